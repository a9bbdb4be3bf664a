"""gpuledger: an event-sourced scheduler for the memory of finite accelerators."""
