"""Whether a program complains of memory: in what it printed before it ended, or in the answer of an error.

The words are those of CUDA, HIP, PyTorch, llama.cpp, vLLM, Python and C++, each as its source prints it. Only the
device can confirm that it was memory (semantics.md 8).
"""

from __future__ import annotations

import re
from typing import Final

_WORDS: Final = (
    # cudaGetErrorString, cuGetErrorString and hipGetErrorString ("out of memory"); PyTorch ("CUDA out of memory. Tried
    # to allocate", "HIP out of memory"); Vulkan and the kernel ("Out of memory: Killed process").
    rb"(?i:\bout of memory\b)",
    # The names of these errors: CUDA's runtime and driver API, cuBLAS and cuDNN, HIP, Vulkan, and PyTorch's exception.
    rb"\bcudaErrorMemoryAllocation\b|\bCUDA_ERROR_OUT_OF_MEMORY\b|\bCUBLAS_STATUS_ALLOC_FAILED\b",
    rb"\bCUDNN_STATUS_ALLOC_FAILED\b|\bhipErrorOutOfMemory\b|\bErrorOutOf(?:Device|Host)Memory\b|\bOutOfMemoryError\b",
    # llama.cpp: ggml-backend, ggml-alloc ("failed to allocate CUDA0 buffer of size") and the loader ("unable to
    # allocate CUDA0 buffer"). Pinned memory is an optimisation that it does without (llama.cpp issue 9629).
    rb"\bfailed to allocate\b(?![^\n]*\bpinned memory\b)|\bunable to allocate\b",
    # vLLM, when others hold too much of the card at its start (vllm/v1/worker/utils.py, request_memory).
    rb"\bFree memory on device\b[^\n]*\bis less than desired GPU memory utilization\b",
    # vLLM, when weights and activations leave too little for one request (vllm issues 2248 and 17431).
    rb"\bNo available memory for the cache blocks\b|\blarger than the available KV cache memory\b",
    # Python (an exception without a message is its bare name), NumPy, and PyTorch on the host.
    rb"\b(?:_Array)?MemoryError\b|\bDefaultCPUAllocator: (?:can't|not enough memory)",
    # C++ and the C library (ENOMEM).
    rb"\bstd::bad_alloc\b|(?i:\bcannot allocate memory\b)",
)
_OUT_OF_MEMORY: Final = re.compile(b"|".join(_WORDS))


def out_of_memory(text: bytes) -> bool:
    """Whether a text says that memory ran out.

    >>> out_of_memory(b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB.")
    True
    >>> out_of_memory(b"failed to allocate 1900.00 MiB of pinned memory: invalid argument")
    False
    """
    return _OUT_OF_MEMORY.search(text) is not None
