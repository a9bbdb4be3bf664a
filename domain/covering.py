"""The cheapest way to gain enough within a limit of time, exactly: a covering problem in plain integers.

At most one choice of each item is taken. The gains must reach a target, the times must stay within a limit, the
sum of the costs is to be least. That is a knapsack problem, and a branch and bound is at its worst just where a
GPU is usual: models of nearly equal size, prices proportional to size. So the items are split in two halves; of
each half only the sums that no other sum beats in everything are kept, and the halves are joined in one sweep.
Sixteen items of two choices, the worst that a policy of 16 residents allows, have 43 million sums; the two
halves have at most 6,561 each, however the sizes lie.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Choice: TypeAlias = tuple[int, int, int]
"""Cost, gain and time of one choice, none negative."""

_Sum: TypeAlias = tuple[int, int, int]
"""Cost, lack (the gain, negated) and time of some choices: in all three, less is better."""


def cheapest(
    items: Sequence[Sequence[Choice]], target: int, limit: int | None = None, ceiling: int | None = None
) -> int | None:
    """The least cost at which the gains reach `target`, or None where nothing does within `limit` of time.

    Sums that cost more than `ceiling` are not looked at.
    """
    if limit is None or sum(max(time for _, _, time in item) for item in items) <= limit:
        limit, items = 0, [[(cost, gain, 0) for cost, gain, _ in item] for item in items]
    left = _undominated_sums(items[0::2], target, limit, ceiling)
    right = _undominated_sums(items[1::2], target, limit, ceiling)
    return _join(left, right, target, limit)


def _undominated_sums(items: Sequence[Sequence[Choice]], target: int, limit: int, ceiling: int | None) -> list[_Sum]:
    """All sums of these items but those that another one equals or beats in cost, gain and time."""
    sums: list[_Sum] = [(0, 0, 0)]
    for item in items:
        grown = list(sums)
        for cost, gain, time in item:
            grown += [
                # Gain beyond the target is worth nothing: cut off, so that it does not keep a dear sum alive.
                (so_far + cost, max(-target, lack - gain), spent + time)
                for so_far, lack, spent in sums
                if spent + time <= limit and (ceiling is None or so_far + cost <= ceiling)
            ]
        grown.sort()
        # In order of cost: a sum is dominated when a cheaper one takes no more time and lacks no more.
        least_lack = _Staircase()
        sums = [entry for entry in grown if least_lack.add(entry[2], entry[1])]
    return sums


def _join(left: list[_Sum], right: list[_Sum], target: int, limit: int) -> int | None:
    """The least cost of one sum of each half that reach the target together."""
    best: int | None = None
    least_cost = _Staircase()
    waiting = sorted(right, key=_lack, reverse=True)
    # The less a left sum gains, the fewer right sums make up for it: each right sum enters once and stays.
    for cost, lack, time in sorted(left, key=_lack, reverse=True):
        while waiting and waiting[-1][1] + lack <= -target:
            entering = waiting.pop()
            least_cost.add(entering[2], entering[0])
        other = least_cost.at(limit - time)
        if other is not None and (best is None or cost + other < best):
            best = cost + other
    return best


def _lack(entry: _Sum) -> int:
    return entry[1]


@dataclass(slots=True)
class _Staircase:
    """The least value among entries whose key is at most a limit. Keys ascend, values descend."""

    keys: list[int] = field(default_factory=list[int])
    values: list[int] = field(default_factory=list[int])

    def at(self, limit: int) -> int | None:
        step = bisect_right(self.keys, limit)
        return self.values[step - 1] if step else None

    def add(self, key: int, value: int) -> bool:
        """Whether the entry is a step of its own: no entry with as small a key has as small a value."""
        known = self.at(key)
        if known is not None and known <= value:
            return False
        first = bisect_left(self.keys, key)
        last = first
        while last < len(self.values) and self.values[last] >= value:
            last += 1
        self.keys[first:last] = [key]
        self.values[first:last] = [value]
        return True
