"""A process that writes to a stream of a ledger that a scheduler drives, until it is killed: `PATH STREAM`.

What it says is true of no lease that the scheduler has granted, so it changes nothing but the version of the stream. It
says `ready` before it begins.
"""

from __future__ import annotations

import itertools
import sys
import time

from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.events import LeaseRenewed, NewEvent
from gpuledger.domain.ports import Batch, LedgerConflict

#: Between two events, so that the other writer gets the file in between: it is to lose races, not to starve.
PAUSE_SECONDS = 0.001


def main(path: str, stream: str) -> None:
    ledger = SqliteLedger(path)
    print("ready", flush=True)
    for number in itertools.count():
        event = NewEvent(stream, LeaseRenewed("lease-of-another-scheduler", number))
        try:
            ledger.append(Batch((event,), {stream: ledger.stream_version(stream)}), 0)
        except LedgerConflict:
            continue
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
