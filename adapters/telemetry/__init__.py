"""Samples of memory and processes: GPUs by NVML, the host by its kernel, merged into one reading of the node."""
