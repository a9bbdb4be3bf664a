"""Who asks for what and when: orders that a seed draws, in open loop. Nobody waits for an answer to ask again.

Arrivals are a Poisson process whose rate changes every few seconds, so that there are lulls and bursts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Literal

from .scene import CLIENTS, Offer, Who

#: Of all orders, how many in a hundred: go away before their answer is whole, by closing or by resetting the
#: connection; bring a deadline; are named by a key, and then asked again.
_LEAVES: Final = 6
_RESETS: Final = 4
_DEADLINES: Final = 12
_KEYED: Final = 5
#: Of repetitions, how many in a hundred have another body under the same key.
_OTHER_BODY: Final = 20
_PHASE_SECONDS: Final = (4.0, 20.0)
_PHASE_FACTORS: Final = (0.2, 0.6, 1.0, 1.0, 2.5)
_WORDS: Final = (
    "a lease reserves memory for work and the model waits until there is room for what it was measured to take"
)


@dataclass(frozen=True, slots=True)
class Order:
    """One request. `at`: seconds from the beginning. `leaves_after`, `resets_after`: how long until it gives up."""

    number: int
    at: float
    who: Who
    offer: Offer
    body: dict[str, Any]
    stream: bool = False
    deadline_ms: int | None = None
    leaves_after: float | None = None
    resets_after: float | None = None
    key: str | None = None
    key_use: Literal["first", "again", "other body"] = "first"

    @property
    def path(self) -> str:
        return "/v1/embeddings" if self.offer.task == "embedding" else "/v1/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self.who.token}", "Content-Type": "application/json"}
        if self.deadline_ms is not None:
            headers["X-Gpuledger-Deadline-Ms"] = str(self.deadline_ms)
        if self.key is not None:
            headers["Idempotency-Key"] = self.key
        return headers


class Traffic:
    """Orders from one seed. `per_second`: how many on average."""

    def __init__(self, draw: Random, offers: tuple[Offer, ...], per_second: float) -> None:
        self._draw = draw
        self._offers = offers
        self._per_second = per_second
        self._number = 0

    def orders(self, seconds: float) -> Iterator[Order]:
        """In the order of their instants, as long as `seconds`."""
        later: list[Order] = []
        for at in self._arrivals(seconds):
            order = self._order(at)
            if order.key is not None:
                later.append(self._repetition(order, at + self._draw.uniform(0.0, 12.0)))
            due = sorted((one for one in later if one.at <= at), key=lambda one: one.at)
            later = [one for one in later if one.at > at]
            yield from due
            yield order
        yield from sorted(later, key=lambda one: one.at)

    def _arrivals(self, seconds: float) -> Iterator[float]:
        at, phase_ends, rate = 0.0, 0.0, self._per_second
        while True:
            if at >= phase_ends:
                phase_ends = at + self._draw.uniform(*_PHASE_SECONDS)
                rate = self._per_second * self._draw.choice(_PHASE_FACTORS)
            at += self._draw.expovariate(rate)
            if at >= seconds:
                return
            yield at

    def _order(self, at: float) -> Order:
        who = self._draw.choices(CLIENTS, [one.weight for one in CLIENTS])[0]
        offer = self._draw.choices(self._offers, [self._share(one, who) for one in self._offers])[0]
        stream = offer.task == "chat" and self._draw.randrange(2) == 0
        leaves, resets = self._happens(_LEAVES), self._happens(_RESETS)
        self._number += 1
        return Order(
            number=self._number,
            at=at,
            who=who,
            offer=offer,
            body=self._body(offer, stream),
            stream=stream,
            deadline_ms=self._draw.randrange(300, 15_000) if self._happens(_DEADLINES) else None,
            leaves_after=self._draw.uniform(0.0, 3.0) if leaves else None,
            resets_after=self._draw.uniform(0.0, 3.0) if resets and not leaves else None,
            key=f"order-{self._number}" if self._happens(_KEYED) else None,
        )

    def _share(self, offer: Offer, who: Who) -> int:
        """LAB asks for what is LAB's ten times as often as others, who are refused it."""
        return offer.weight * 10 if offer.lab and who.lab else offer.weight if not offer.lab else 1

    def _repetition(self, first: Order, at: float) -> Order:
        self._number += 1
        other = self._happens(_OTHER_BODY)
        body = {**first.body, "user": "somebody else"} if other else first.body
        return Order(
            number=self._number,
            at=at,
            who=first.who,
            offer=first.offer,
            body=body,
            stream=first.stream,
            key=first.key,
            key_use="other body" if other else "again",
        )

    def _happens(self, hundredths: int) -> bool:
        return self._draw.randrange(100) < hundredths

    def _body(self, offer: Offer, stream: bool) -> dict[str, Any]:
        if offer.task == "embedding":
            texts = [self._text(offer.words) for _ in range(self._draw.randrange(1, 5))]
            return {"model": offer.capability, "input": texts if len(texts) > 1 else texts[0]}
        return {
            "model": offer.capability,
            "messages": [{"role": "user", "content": self._text(offer.words)}],
            "max_tokens": self._draw.randrange(1, offer.max_tokens + 1),
            "stream": stream,
        }

    def _text(self, most_words: int) -> str:
        return " ".join(self._draw.choices(_WORDS.split(), k=self._draw.randrange(1, most_words + 1)))
