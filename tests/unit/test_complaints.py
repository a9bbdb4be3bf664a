"""Words of want of memory, as programs print them, and words that are not."""

from __future__ import annotations

import pytest

from gpuledger.adapters.complaints import out_of_memory

GB10 = "Free memory on device cuda:0 (2.6/121.63 GiB) on startup is less than desired GPU memory utilization (0.08)"


@pytest.mark.parametrize(
    "text",
    [
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9 MiB on device 0: cudaMalloc failed: out of memory",
        "alloc_tensor_range: failed to allocate CUDA0 buffer of size 151851674624",
        "ggml_gallocr_reserve_n: failed to allocate ROCm0 buffer of size 14822711296",
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        "CUDA error: out of memory",
        "(VllmWorker rank=1) ERROR [multiproc_executor.py:375] torch.OutOfMemoryError: CUDA out of memory. Tried to",
        "torch.cuda.OutOfMemoryError",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests.",
        "RuntimeError: cudaErrorMemoryAllocation",
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "hipErrorOutOfMemory",
        "vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        f"ValueError: {GB10}",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "(5.62 GiB KV cache is needed, which is larger than the available KV cache memory (4.50 GiB).",
        "Traceback (most recent call last):\nMemoryError\n",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 1 TiB for an array",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "OSError: [Errno 12] Cannot allocate memory",
        "Out of memory: Killed process 4242 (python)",
        '{"error":{"code":500,"message":"CUDA out of memory"}}',
    ],
)
def test_want_of_memory_is_recognised(text: str) -> None:
    assert out_of_memory(b"INFO loading\n" + text.encode() + b"\nINFO exiting\n")


@pytest.mark.parametrize(
    "text",
    [
        "",
        # It does without: pinned memory only makes copies faster.
        "ggml_cuda_host_malloc: failed to allocate 1900,00 MiB of pinned memory: invalid argument",
        "GPU KV cache size: 215,040 tokens",
        "Free memory on device cuda:0: 20 GiB",
        "Available KV cache memory: 13.96 GiB",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "the memory of the crowd ran out of luck",
        "unknown model architecture: 'memory'",
    ],
)
def test_other_words_are_not(text: str) -> None:
    assert not out_of_memory(text.encode())


def test_a_warning_does_not_hide_a_complaint() -> None:
    pinned = b"failed to allocate 19.00 MiB of pinned memory: no resource\n"
    assert out_of_memory(pinned + b"alloc_tensor_range: failed to allocate CUDA0 buffer of size 1\n")
