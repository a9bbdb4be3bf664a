"""Decisions: frozen values in, values out. No clock, randomness, I/O, environment or log (architecture.md)."""
