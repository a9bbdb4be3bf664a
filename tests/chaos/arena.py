"""The scheduler under test: started, killed, started again, and where it is now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.integration.serving import Serving, serving

#: A start measures nothing after the first one; on a busy machine it still takes seconds.
READY_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.1


class NotReady(Exception):
    """The scheduler did not get ready, or has left by itself; the message has the end of its log."""


@dataclass(slots=True)
class Outage:
    """While no scheduler answers by our doing, in seconds of the monotonic clock. `over` is None while it lasts."""

    since: float
    over: float | None = None

    def touches(self, begin: float, end: float) -> bool:
        return self.since <= end and (self.over is None or begin <= self.over)


@dataclass
class Arena:
    """One folder, one ledger, as many schedulers as are killed."""

    folder: Path
    config: Mapping[str, Any]
    outages: list[Outage] = field(default_factory=list[Outage])
    starts: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _server: Serving | None = None

    @property
    def server(self) -> Serving:
        """The one that runs, or ran last."""
        assert self._server is not None, "nothing was started"
        return self._server

    @property
    def base_url(self) -> str:
        return self.server.base_url

    @property
    def is_up(self) -> bool:
        return bool(self.outages) and self.outages[-1].over is not None

    def start(self) -> None:
        """A scheduler that is ready when this returns. Raises NotReady."""
        if not self.outages:
            self.outages.append(Outage(time.monotonic()))
        self._server = self._stack.enter_context(serving(self.folder, self.config, ready=False))
        self.starts += 1
        self._until_ready(self._server)
        self.outages[-1].over = time.monotonic()

    def restart(self) -> None:
        """Leave in order, and start again. Raises NotReady."""
        self.outages.append(Outage(time.monotonic()))
        self._stack.close()
        self.start()

    def kill(self) -> None:
        """SIGKILL; what it was doing is lost, and its clients with it."""
        self.outages.append(Outage(time.monotonic()))
        self.server.kill()
        self._stack.close()  # its pipes; the process has ended

    def close(self) -> None:
        """End what runs, in whatever state."""
        self._stack.close()

    def was_out(self, begin: float, end: float) -> bool:
        """Whether no scheduler answered at some time between."""
        return any(outage.touches(begin, end) for outage in self.outages)

    def _until_ready(self, server: Serving) -> None:
        deadline = time.monotonic() + READY_SECONDS
        with httpx.Client(base_url=server.base_url, trust_env=False, timeout=10.0) as http:
            while not _answers(http):
                if server.process.poll() is not None:
                    raise NotReady(f"the scheduler left with {server.process.returncode}:\n{server.log()}")
                if time.monotonic() >= deadline:
                    raise NotReady(f"not ready after {READY_SECONDS:.0f} s:\n{server.log()}")
                time.sleep(_POLL_SECONDS)


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False
