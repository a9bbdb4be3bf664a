"""When NVML is initialised, and when anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from . import nvml_binding as nvml
from .nvml_binding import NvmlBinding, NvmlError

_NANOS_PER_MS: Final = 1_000_000


class NvmlSession:
    """The time between an initialisation and the failure of it. For one thread.

    After a driver's reload or a card's reset NVML answers again only once it has been shut down and initialised.
    """

    def __init__(self, binding: NvmlBinding, retry_ms: int, refresh_ms: int, monotonic_ns: Callable[[], int]) -> None:
        self.binding = binding
        #: Counts sessions: what a driver handed out is good in the one in which it did.
        self.number = 0
        self._retry_ns = retry_ms * _NANOS_PER_MS
        self._refresh_ns = refresh_ms * _NANOS_PER_MS
        self._monotonic_ns = monotonic_ns
        self._driver_version: str | None = None
        self._error = NvmlError(nvml.UNINITIALIZED, "nvmlInit")
        #: Not before, and due at: both by the monotonic clock.
        self._retry_at_ns: int | None = None
        self._refresh_at_ns: int | None = None

    def begin(self) -> str:
        """The driver's version, in an open session. Raises NvmlError: the newest one while it is too early to retry."""
        now_ns = self._monotonic_ns()
        if self._driver_version is not None and self._refresh_at_ns is not None and now_ns >= self._refresh_at_ns:
            self._end()
        if self._driver_version is not None:
            return self._driver_version
        if self._retry_at_ns is not None and now_ns < self._retry_at_ns:
            raise self._error
        self._retry_at_ns = now_ns + self._retry_ns
        self.binding.open()
        self.number += 1
        self._driver_version = self.binding.driver_version()
        return self._driver_version

    def abandon(self, error: NvmlError) -> None:
        """The driver as a whole failed: end the session, to begin a new one when it is time."""
        self._error = error
        self._end()

    def judge(self, *, failing: bool, others_answer: bool) -> None:
        """After a sample: a card that fails is looked for in a new session, less often while others would suffer."""
        if not failing:
            self._refresh_at_ns = None
        elif self._refresh_at_ns is None:
            self._refresh_at_ns = self._monotonic_ns() + (self._refresh_ns if others_answer else self._retry_ns)

    def _end(self) -> None:
        self._driver_version = None
        self._refresh_at_ns = None
        self.binding.close()
