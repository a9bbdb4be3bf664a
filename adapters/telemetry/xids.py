"""The Xids after which a card does no work until it was reset, and why each is one of them.

From NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog"): every Xid
whose immediate action is a reset of the GPU or a restart of the machine, and two whose workflows lead there (48, 74).

Left out on purpose, though the driver calls them critical too:

- 13, 31, 43, 45, 69, 94 and the engines' exceptions end an application, and a new one may use the card at once; 63, 92
  and 121 ask for nothing at once. Rows that wait for a reset (63) are seen as ROW_REMAP_PENDING.
- 109 (a context switch timed out): the catalog asks for a reset, NVIDIA's own device plugin for Kubernetes takes it for
  an error of the application. A model that hangs shall not take the card from all others; its loads fail and back off.
- 144 to 150 (NVLink 5) are fatal or not by a status word that NVML does not hand over; those that are come with 48.
- 154 says only that another Xid has changed what the card needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FATAL_XIDS: Final[Mapping[int, str]] = {
    46: "the GPU stopped processing and did not answer in time",
    48: "a double-bit ECC error: data in memory is lost, and the page is retired by a reset",
    62: "an internal micro-controller halted: clocks and power are managed no more",
    64: "a broken row or page could not be recorded for replacement, and will be used again",
    74: "an NVLink error: what goes over the link is lost until the links are trained anew",
    79: "the GPU has fallen off the bus: nothing reaches it any more",
    95: "an uncontained memory error: any process on the card may compute with wrong data",
    110: "a security fault: the card refuses further work",
    119: "the GPU's system processor did not answer the driver in time",
    120: "the GPU's system processor failed",
    136: "the training of an NVLink failed",
    140: "an ECC error that was not recovered from",
    143: "the GPU could not be initialised",
    155: "NVLinks were taken down by software: peers cannot be reached until a reset",
    156: "a part of the chip was retired, which takes effect with a reset",
    158: "a fatal timeout of the GPU",
}
_WORD: Final = "XID_"


def cause_of(xid: int) -> str:
    """The word under which a fatal Xid stands in the ledger."""
    return f"{_WORD}{xid}"


def is_xid(cause: str) -> bool:
    """Whether a cause is one of these."""
    return cause.startswith(_WORD)
