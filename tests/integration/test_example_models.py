"""The example models in the server that serves them: llama.cpp reads them, and computes what it should."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

#: A server in a child of its own: it has no way to be stopped but the end of its process.
CHILD = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel = sys.argv[1], 0, 1
params.cpuparams.n_threads, params.warmup, params.verbosity = 1, False, 0
params.embedding = sys.argv[2] == "embedding"
params.n_ctx = params.n_batch = params.n_ubatch = 512
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def served(model: Path, task: str) -> Generator[httpx.Client]:
    command = [sys.executable, "-c", CHILD, str(model), task]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        try:
            with httpx.Client(base_url=address, timeout=120) as client:
                yield client
        finally:
            child.kill()


@pytest.fixture(scope="module")
def embedder(minilm_gguf: Path) -> Generator[httpx.Client]:
    with served(minilm_gguf, "embedding") as client:
        yield client


@pytest.fixture(scope="module")
def chat(tiny_chat_gguf: Path) -> Generator[httpx.Client]:
    with served(tiny_chat_gguf, "chat") as client:
        yield client


def token_ids(client: httpx.Client, text: str) -> list[int]:
    answer = client.post("/tokenize", json={"content": text, "add_special": True})
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def embed(client: httpx.Client, texts: Sequence[str]) -> list[NDArray[np.float64]]:
    answer = client.post("/v1/embeddings", json={"model": "m", "input": list(texts)})
    return [np.asarray(item["embedding"]) for item in answer.json()["data"]]


class TestMiniLM:
    def test_a_paraphrase_is_nearer_than_an_unrelated_sentence(self, embedder: httpx.Client) -> None:
        said, again, other = embed(
            embedder,
            [
                "How do I reset my password?",
                "What should I do to reset my password?",
                "The volcano erupted early on Tuesday.",
            ],
        )
        assert said @ said == pytest.approx(1.0, abs=1e-4)
        assert said @ again > 0.8
        assert said @ other < 0.2

    @pytest.mark.parametrize(
        ("text", "ids"),
        [
            ("hello world", [101, 7592, 2088, 102]),
            ("HELLO, World!", [101, 7592, 1010, 2088, 999, 102]),
            ("unaffable", [101, 14477, 20961, 3468, 102]),
            ("résumé", [101, 13746, 102]),
            ("", [101, 102]),
        ],
    )
    def test_it_reads_text_as_bert_base_uncased_does(self, embedder: httpx.Client, text: str, ids: list[int]) -> None:
        assert token_ids(embedder, text) == ids

    def test_it_computes_what_the_weights_say(self, embedder: httpx.Client, minilm_gguf: Path) -> None:
        """Against a BERT of our own, in float64: other code, other order of sums, the same sentence."""
        text = "An append-only ledger proves afterwards why a scheduler decided what it decided."
        expected = bert(minilm_gguf, token_ids(embedder, text))
        (found,) = embed(embedder, [text])
        assert expected @ found > 0.9999


class TestTinyChat:
    def test_it_reads_words_and_any_bytes(self, chat: httpx.Client) -> None:
        assert len(token_ids(chat, "the quick brown bird")) == 1 + 4
        answer = chat.post("/detokenize", json={"tokens": token_ids(chat, "über \U0001f600\n\t~")[1:]})
        assert answer.json()["content"].strip() == "über \U0001f600\n\t~"

    @pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"temperature": 1.0, "top_k": 0, "top_p": 1}])
    def test_it_says_words_and_does_not_stop_by_itself(self, chat: httpx.Client, sampling: dict[str, Any]) -> None:
        question = {"model": "m", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 200}
        choice = chat.post("/v1/chat/completions", json=question | sampling).json()["choices"][0]
        said: str = choice["message"]["content"]
        assert choice["finish_reason"] == "length"
        assert said.isascii()
        assert said.replace(",", "").replace(".", "").replace(" ", "").isalpha()
        assert len(said.split()) > 100

    def test_it_streams(self, chat: httpx.Client) -> None:
        question = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 20}
        with chat.stream("POST", "/v1/chat/completions", json=question) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert len(lines) > 20
        assert lines[-1] == "data: [DONE]"


# ---- a BERT to compare with -------------------------------------------------------------------------------------

Array = NDArray[np.float64]


def bert(path: Path, ids: Sequence[int]) -> Array:
    """The normalized mean-pooled embedding of a token sequence, straight from the paper."""
    weights: dict[str, Array] = {t.name: t.data.astype(np.float64) for t in GGUFReader(path).tensors}

    def dense(name: str, x: Array) -> Array:
        result: Array = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        return result

    def norm(name: str, x: Array) -> Array:
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt(centered.var(-1, keepdims=True) + 1e-12)
        result: Array = scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]
        return result

    x = weights["token_embd.weight"][list(ids)] + weights["position_embd.weight"][: len(ids)]
    x = norm("token_embd_norm", x + weights["token_types.weight"][0])
    for layer in range(6):
        block = f"blk.{layer}"
        q, k, v = (dense(f"{block}.attn_{part}", x).reshape(-1, 12, 32).swapaxes(0, 1) for part in "qkv")
        scores = np.exp(q @ k.swapaxes(1, 2) / math.sqrt(32))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ v
        x = norm(f"{block}.attn_output_norm", x + dense(f"{block}.attn_output", mixed.swapaxes(0, 1).reshape(-1, 384)))
        up = dense(f"{block}.ffn_up", x)
        gelu = up * 0.5 * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
        x = norm(f"{block}.layer_output_norm", x + dense(f"{block}.ffn_down", gelu))
    mean = x.mean(0)
    normalized: Array = mean / np.linalg.norm(mean)
    return normalized
