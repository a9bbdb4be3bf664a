"""A process that drives a ledger as a scheduler does, with fake devices: `PATH PREFIX`.

It says `held` when it has the ledger, and `working` when two requests (PREFIX-one, PREFIX-two) hold what they could
get; after each it waits for a line.
"""

from __future__ import annotations

import os
import sys

from gpuledger.adapters.clock import LedgerClock
from gpuledger.adapters.ledger.lock import LedgerLock
from gpuledger.adapters.ledger.sqlite import SqliteLedger
from gpuledger.domain.messages import EnvelopeTaken, Started
from gpuledger.domain.units import GIB
from gpuledger.tools.snapshots import load_world
from tests.simulation.ledgers import MODELS
from tests.simulation.virtual_shell import Card, VirtualShell, configuration


def main(path: str, prefix: str) -> None:
    with LedgerLock(path):
        ledger = SqliteLedger(path)
        print("held", flush=True)
        sys.stdin.readline()
        shell = VirtualShell(ledger, MODELS, (Card("GPU-0", 16 * GIB),))
        shell.world = load_world(ledger)
        shell.now = LedgerClock(shell.world.at).now()
        shell.feed(Started(configuration(MODELS, pid=os.getpid())))
        shell.sample()
        for model in MODELS:
            if not shell.world.deployments[model.deployment_id].measured:
                shell.feed(EnvelopeTaken(model.measured("GPU-0", shell.now)))
        shell.ask(f"{prefix}-one", "embed@1")
        shell.ask(f"{prefix}-two", "vision@1")
        print("working", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
