"""What a scheduler tells its parts of earlier runs."""

from __future__ import annotations

from gpuledger.domain.events import AcceleratorHealthChanged
from gpuledger.domain.state import Health
from gpuledger.tools.bootstrap import newest_xid_mark
from tests.unit.driven import CARD, DrivenLedger


def test_the_newest_mark_of_an_xid_is_known_though_it_was_cleared() -> None:
    """Those of counters are of another kind: they may be as great as any."""
    ledger = DrivenLedger()
    stream = f"accelerator:{CARD}"
    assert newest_xid_mark(ledger.world) == 0
    ledger.add(stream, AcceleratorHealthChanged(CARD, Health.FAILED, "XID_79", 7))
    assert newest_xid_mark(ledger.world) == 7
    ledger.add(stream, AcceleratorHealthChanged(CARD, Health.HEALTHY, "cleared", 7, "ann"))
    ledger.add(stream, AcceleratorHealthChanged(CARD, Health.DEGRADED, "ECC_UNCORRECTED", 99))
    assert newest_xid_mark(ledger.world) == 7
    ledger.add(stream, AcceleratorHealthChanged(CARD, Health.FAILED, "XID_48", 8))
    assert newest_xid_mark(ledger.world) == 8
