"""A process that appends to a ledger, for tests of several at once: `PATH STREAM COUNT`.

It says `ready`, waits for a line, and then says each `seq` that it was given.
"""

from __future__ import annotations

import sys

from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.events import LeaseRenewed, NewEvent
from gpuledger.domain.ports import Batch, LedgerConflict


def main(path: str, stream: str, count: int) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    ledger = SqliteLedger(path)
    for number in range(count):
        event = NewEvent(stream, LeaseRenewed(f"lease-{number}", number))
        while True:
            try:
                last = ledger.append(Batch((event, event), {stream: ledger.stream_version(stream)}), 0)[-1]
            except LedgerConflict:
                continue
            break
        print(last.seq, flush=True)
    ledger.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
