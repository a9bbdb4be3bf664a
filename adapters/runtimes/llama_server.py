"""llama.cpp's HTTP server of the PyPI package xllamacpp, behind the few options of `llama-server` that we use.

    LLAMA_API_KEY=... python -I llama_server.py --model FILE --port N --ctx-size N ...

So the adapter has one command line for both. It runs by its path in a process of its own and imports nothing of ours.
Exit status 1 is a model or an option that llama.cpp refused, with its complaint on stderr.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from typing import Any, Protocol

#: The environment variables of llama-server that have no place on the command line of older ones (llama_cpp.py).
_ENVIRONMENT = "LLAMA_ARG_"


class Server(Protocol):
    """The part of `xllamacpp.Server` that is used: it serves, in threads of its own, while it exists."""

    @property
    def listening_address(self) -> str: ...


class Facade:
    """The untyped extension module, touched only here."""

    def __init__(self) -> None:
        self._module: Any = importlib.import_module("xllamacpp")

    def serve(self, options: argparse.Namespace, api_key: str) -> Server:
        """Load the model and listen. Raises RuntimeError."""
        if options.device not in {"none", *self._devices()}:
            raise RuntimeError(f"invalid device: {options.device}")
        params = self._module.CommonParams()
        self._set_model(params, options)
        self._set_memory(params, options)
        params.hostnames = [options.host]
        params.port = options.port
        params.api_keys = [api_key]
        params.endpoint_metrics = options.metrics
        params.ui = False
        params.verbosity = options.verbosity
        server: Server = self._module.Server(params)
        return server

    def _set_model(self, params: Any, options: argparse.Namespace) -> None:
        params.model.path = options.model
        modes = self._module.llama_load_mode
        params.load_mode = modes.LLAMA_LOAD_MODE_NONE if options.no_mmap else modes.LLAMA_LOAD_MODE_MMAP
        params.n_gpu_layers = options.n_gpu_layers
        if options.mmproj is not None:
            params.mmproj.path = options.mmproj
            # What sees runs where the layers run, and nowhere else.
            params.mmproj_use_gpu = options.n_gpu_layers > 0
        params.sampling.seed = options.seed
        params.cpuparams.n_threads = options.threads
        params.cpuparams_batch.n_threads = options.threads_batch

    def _set_memory(self, params: Any, options: argparse.Namespace) -> None:
        params.n_ctx = options.ctx_size
        params.n_parallel = options.parallel
        params.n_batch = options.batch_size
        params.n_ubatch = options.ubatch_size
        params.cache_type_k = self._member("ggml_type", "GGML_TYPE", options.cache_type_k)
        params.cache_type_v = self._member("ggml_type", "GGML_TYPE", options.cache_type_v)
        flash = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[options.flash_attn]
        params.flash_attn_type = self._member("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE", flash)
        if options.embeddings:
            params.embedding = True
        if options.reranking:
            params.embedding = True
            params.pooling_type = self._member("llama_pooling_type", "LLAMA_POOLING_TYPE", "rank")
        elif options.pooling is not None:
            params.pooling_type = self._member("llama_pooling_type", "LLAMA_POOLING_TYPE", options.pooling)
        # What llama-server is told by its environment.
        params.cache_ram_mib = int(os.environ.get(_ENVIRONMENT + "CACHE_RAM", "0"))
        params.n_ctx_checkpoints = int(os.environ.get(_ENVIRONMENT + "CTX_CHECKPOINTS", "0"))
        params.fit_params = os.environ.get(_ENVIRONMENT + "FIT", "off") == "on"
        params.kv_unified = False

    def _devices(self) -> set[str]:
        return {str(device["name"]) for device in self._module.get_device_info()}

    def _member(self, enumeration: str, prefix: str, name: str) -> Any:
        return getattr(getattr(self._module, enumeration), f"{prefix}_{name.upper()}")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options, by the names that llama-server gives them."""
    parser = argparse.ArgumentParser(prog="llama_server", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    for number in ("ctx-size", "parallel", "batch-size", "ubatch-size", "threads", "threads-batch", "n-gpu-layers"):
        parser.add_argument(f"--{number}", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--verbosity", type=int, required=True)
    for name in ("cache-type-k", "cache-type-v", "flash-attn", "device"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--pooling")
    parser.add_argument("--mmproj")
    for flag in ("no-mmap", "metrics", "embeddings", "reranking"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        server = Facade().serve(options, os.environ["LLAMA_API_KEY"])
    except RuntimeError as error:
        print(f"llama.cpp: {error}", file=sys.stderr)
        return 1
    # It serves in threads of its own until SIGTERM ends the process: there is nothing to save.
    print(f"serving at {server.listening_address}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
