"""Every breakage at every step of every scenario, which takes some minutes: what the suite takes a sample of.

    python -m tests.simulation.breakable_search [--part 0/2] [--only WORDS] [--every N]

prints each case that does not hold, and how often what is said of it was said; the exit status tells whether any.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator

from .breakable_lives import Missed, check_replay, lived, undisturbed
from .breakable_scenarios import SCENARIOS, Scenario
from .breakages import BREAKAGES, Breakage


def cases() -> Iterator[tuple[Scenario, int, Breakage]]:
    """All of them."""
    for scenario in SCENARIOS:
        for position in range(1, undisturbed(scenario).ledger.appends + 1):
            for breakage in BREAKAGES:
                yield scenario, position, breakage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="0/1", help="Of so many parts this one, for several processes.")
    parser.add_argument("--only", default="", help="Cases whose scenario or breakage has these words.")
    parser.add_argument("--every", type=int, default=1, help="Every so many cases only.")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    said, lives = Counter[str](), 0
    for number, (scenario, position, breakage) in enumerate(cases()):
        wanted = options.only in scenario.name or options.only in breakage.name
        if not wanted or number % options.every or number // options.every % parts != part:
            continue
        try:
            check_replay(lived(scenario, breakage, position))
        except Missed:
            continue
        except AssertionError as wrong:
            said[str(wrong)[:100]] += 1
            print(f"{scenario.name!r}, step {position}, {breakage.name!r}: {wrong}", flush=True)
        lives += 1
    print(f"{lives} lives, {said.total()} of them wrong: {dict(said)}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
