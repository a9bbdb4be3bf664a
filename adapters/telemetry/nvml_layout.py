"""Which accelerators there are by NVML: whole cards, or the MIG instances of partitioned ones (semantics.md 1).

A partitioned card is its instances and not itself. Their handles do not outlive a change of the layout, so the layout
is read anew in each sample. What is missing from a layout that was read without error is gone; what cannot be seen for
an error is a fault, and so is a card that has vanished.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpuledger.domain.ports import TelemetryFault
from gpuledger.domain.state import Health
from gpuledger.domain.units import ID_PATTERN

from . import nvml_binding as nvml
from .faults import FaultCode, fault
from .nvml_binding import Device, NvmlBinding, NvmlError
from .nvml_faults import fault_of

#: An instance has the index (index of its card + 1) * this + its GPU instance id: like no card's, like no other
#: instance's, and the same while it lives. Ids of GPU instances are below 16, and a machine has fewer cards than this.
INSTANCE_INDEX_STEP: Final = 100
#: What an accelerator can be called: by anything else it could be told neither to a runtime nor to the ledger.
_UUID: Final = re.compile(ID_PATTERN)
#: How the UUID of an instance begins, and that of a card does not.
_INSTANCE_PREFIX: Final = "MIG-"
#: What is gone is told in every sample, since the one that told it first may be lost: so many, the newest.
MAX_GONE: Final = 256


@dataclass(frozen=True, slots=True)
class Card:
    """A card as it was found in this sample."""

    uuid: str
    index: int
    name: str
    device: Device


@dataclass(frozen=True, slots=True)
class Place:
    """An accelerator as it was found in this sample: a card, or the GPU instance `instance` of a partitioned one."""

    accelerator_id: str
    index: int
    name: str
    device: Device
    card: Card
    instance: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """What one look found. `failing`: something does not answer that a new session may bring back."""

    cards: tuple[Card, ...]
    places: tuple[Place, ...]
    faults: tuple[TelemetryFault, ...]
    gone: tuple[str, ...]
    failing: bool


@dataclass(frozen=True, slots=True)
class _Known:
    """Where an accelerator was last found; None as far as only an earlier run knew."""

    card: str | None
    index: int | None

    @classmethod
    def earlier(cls, accelerator_id: str) -> _Known:
        """Of an earlier run: a card is its own, the card of an instance is not in its id."""
        return cls(None if accelerator_id.startswith(_INSTANCE_PREFIX) else accelerator_id, None)


@dataclass(frozen=True, slots=True)
class _Partition:
    """One card as it is divided now.

    `whole` is None where that could not be seen. `shared`: instances that are not offered, as their memory is another
    one's. `error`: why not all of it could be seen.
    """

    whole: bool | None
    places: tuple[Place, ...] = ()
    shared: tuple[str, ...] = ()
    error: NvmlError | None = None


class LayoutReader:
    """Looks, and remembers which accelerators there were. For one thread."""

    def __init__(self, binding: NvmlBinding, known: Iterable[str] = ()) -> None:
        """`known`: accelerators of earlier runs. MIG is set up while nothing runs, and cards are taken out."""
        self._binding = binding
        self._known = {one: _Known.earlier(one) for one in known}
        #: A dict for its order: the oldest first.
        self._gone: dict[str, None] = {}

    def known(self) -> tuple[str, ...]:
        """Every accelerator that was there, and was not seen to go."""
        return tuple(sorted(self._known))

    def read(self) -> Layout:
        """Raises NvmlError when the driver as a whole does not answer; a card that does not is a fault."""
        cards, silent, nameless = self._cards()
        partitions = {card.uuid: self._partition(card) for card in cards}
        places = tuple(place for card in cards for place in partitions[card.uuid].places)
        shared = [one for partition in partitions.values() for one in partition.shared]
        missing = sorted(self._known.keys() - {place.accelerator_id for place in places})
        whole_view = not silent and all(one.error is None for one in partitions.values())
        gone = [one for one in missing if _has_gone(one, self._known[one], partitions, whole_view)]
        unseen = [one for one in missing if one not in gone]
        lost = [self._lost(one, partitions, silent) for one in unseen]
        faults = [*lost, *self._of_nothing_known(partitions, silent, unseen)]
        vanished = any(one.code == FaultCode.GPU_VANISHED for one in lost)
        self._remember(places, partitions, gone)
        return Layout(
            cards=tuple(cards),
            places=places,
            faults=(
                *faults,
                *(fault(one, FaultCode.MIG_MEMORY_SHARED) for one in shared),
                *(fault(None, FaultCode.UUID_UNUSABLE) for _ in range(nameless)),
            ),
            gone=tuple(self._gone),
            failing=bool(silent) or vanished or any(_may_mend(one.error) for one in partitions.values()),
        )

    # ---- cards and their instances ----

    def _cards(self) -> tuple[list[Card], dict[int, NvmlError], int]:
        """The cards that answer, by index why others do not, and how many have no name of their own."""
        nameless = 0
        cards: list[Card] = []
        silent: dict[int, NvmlError] = {}
        for index in range(self._binding.device_count()):
            try:
                device = self._binding.device(index)
                card = Card(self._binding.uuid(device), index, self._binding.name(device), device)
            except NvmlError as error:
                silent[index] = error
                continue
            if _UUID.fullmatch(card.uuid) is None or any(card.uuid == other.uuid for other in cards):
                nameless += 1
            else:
                cards.append(card)
        return cards, silent, nameless

    def _partition(self, card: Card) -> _Partition:
        """In a container a card may not say whether it is partitioned; its instances tell, and without them nothing."""
        try:
            partitioned = self._binding.mig_enabled(card.device)
        except NvmlError as error:
            if error.code == nvml.NO_PERMISSION:
                instances = self._instances(card)
                return instances if instances.places else _Partition(None, error=error)
            if error.code not in nvml.NOT_OFFERED:
                return _Partition(None, error=error)
            partitioned = False
        if partitioned:
            return self._instances(card)
        return _Partition(True, (Place(card.uuid, card.index, card.name, card.device, card),))

    def _instances(self, card: Card) -> _Partition:
        """Each slot for itself: one that cannot be looked into does not hide the others."""
        found: dict[int, list[tuple[int, Place]]] = {}
        failed: NvmlError | None = None
        try:
            slots = self._binding.max_instances(card.device)
        except NvmlError as error:
            return _Partition(False, error=error)
        for slot in range(slots):
            try:
                device = self._binding.instance(card.device, slot)
                if device is not None:
                    gpu_instance = self._binding.gpu_instance(device)
                    compute_instance = self._binding.compute_instance(device)
                    place = self._place(card, device, gpu_instance)
                    found.setdefault(gpu_instance, []).append((compute_instance, place))
            except NvmlError as error:
                failed = failed or error
        ranked = [[place for _, place in sorted(places, key=self._rank)] for places in found.values()]
        return _Partition(
            whole=False,
            places=tuple(first for first, *_ in ranked),
            shared=tuple(one.accelerator_id for _, *others in ranked for one in others),
            error=failed,
        )

    def _place(self, card: Card, device: Device, gpu_instance: int) -> Place:
        index = (card.index + 1) * INSTANCE_INDEX_STEP + gpu_instance
        return Place(self._binding.uuid(device), index, self._binding.name(device), device, card, gpu_instance)

    def _rank(self, numbered: tuple[int, Place]) -> tuple[bool, int]:
        """Of compute instances that share their memory, the one that was offered before, else the lowest."""
        compute_instance, place = numbered
        return place.accelerator_id not in self._known, compute_instance

    # ---- what is missing ----

    def _lost(
        self, accelerator_id: str, partitions: Mapping[str, _Partition], silent: Mapping[int, NvmlError]
    ) -> TelemetryFault:
        """Why it cannot be seen: an index that errs is the card that was last there.

        Of an accelerator of an earlier run that is not known: whatever errs may be it.
        """
        known = self._known[accelerator_id]
        partition = None if known.card is None else partitions.get(known.card)
        if partition is not None:
            error = partition.error
        elif known.index is not None:
            error = silent.get(known.index)
        else:
            of_cards = (one.error for one in partitions.values() if known.card is None)
            error = next((one for one in (*silent.values(), *of_cards) if one is not None), None)
        if error is None:
            return fault(accelerator_id, FaultCode.GPU_VANISHED, Health.LOST)
        return fault_of(accelerator_id, error)

    def _of_nothing_known(
        self, partitions: Mapping[str, _Partition], silent: Mapping[int, NvmlError], unseen: Sequence[str]
    ) -> list[TelemetryFault]:
        """Errors behind which no known accelerator is: of a card never read, of an instance without a name."""
        explained = {self._known[one].card for one in unseen}
        indices = {self._known[one].index for one in unseen if self._known[one].card not in partitions}
        faults: list[TelemetryFault] = []
        for uuid, partition in partitions.items():
            if partition.error is not None and uuid not in explained:
                of_card = fault_of(uuid, partition.error)
                faults.append(of_card if partition.whole is None else fault(uuid, of_card.code))
        return [*faults, *(fault_of(None, error) for index, error in silent.items() if index not in indices)]

    def _remember(self, places: Sequence[Place], partitions: Mapping[str, _Partition], gone: Sequence[str]) -> None:
        for one in gone:
            del self._known[one]
        for place in places:
            self._known[place.accelerator_id] = _Known(place.card.uuid, place.card.index)
            self._gone.pop(place.accelerator_id, None)
        for one in (*gone, *(uuid for uuid, partition in partitions.items() if partition.whole is False)):
            self._gone.pop(one, None)
            self._gone[one] = None
        for oldest in tuple(self._gone)[:-MAX_GONE]:
            del self._gone[oldest]


def _has_gone(accelerator_id: str, known: _Known, partitions: Mapping[str, _Partition], whole_view: bool) -> bool:
    """Whether a card's division, as far as it was read, leaves no room for this accelerator.

    `whole_view`: nothing erred, so that an instance of no known card is on none of them.
    """
    if known.card is None:
        return whole_view
    partition = partitions.get(known.card)
    if partition is None or partition.whole is None:
        return False
    return accelerator_id == known.card or partition.whole or partition.error is None


def _may_mend(error: NvmlError | None) -> bool:
    return error is not None and error.code not in nvml.NOT_OFFERED
