"""What the reference runtime has been told to do wrong (`ReferenceFaults`), and whether it does so now."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flaws:
    """What goes wrong with one request. `leak_bytes`, `dies_after`: see `grow_bytes`, `crash_after_tokens`."""

    crashes: bool = False
    dies_after: int | None = None
    broken: bool = False
    hangs: bool = False
    lies: bool = False
    out_of_memory: bool = False
    leak_bytes: int = 0


class Faults:
    """They act while `while_file` exists, where one is named: it is looked for each time, so they come and go."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self.exit_status: int = config["exit_status"]

    def has(self, name: str) -> bool:
        return bool(self._config[name]) and self._act()

    @property
    def of_the_load(self) -> str | None:
        told: str | None = self._config["fail_load"]
        return told if self._act() else None

    def of_request(self, number: int) -> Flaws:
        """Requests are counted from 1; the functional check of a load is the first."""
        if not self._act():
            return Flaws()
        config, limit = self._config, self._config["crash_after_requests"]
        crashes = limit is not None and number > limit
        if number <= config["healthy_requests"]:
            return Flaws(crashes)
        return Flaws(
            crashes=crashes,
            dies_after=config["crash_after_tokens"],
            broken=config["invalid_output"],
            hangs=config["hang_requests"],
            lies=config["lie_ready"],
            out_of_memory=config["oom_requests"],
            leak_bytes=config["grow_bytes"],
        )

    def _act(self) -> bool:
        marker: str | None = self._config["while_file"]
        return marker is None or os.path.exists(marker)
