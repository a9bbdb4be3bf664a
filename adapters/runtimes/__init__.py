"""Model servers as child processes: started held, checked, watched and ended (semantics.md 7; runtimes.md)."""

from __future__ import annotations
