"""Event <-> leaf: the canonical bytes that are stored, hashed and exported (ledger.md, Bytes).

A leaf is RFC 8785 JSON of a fixed envelope around the data of an event:

    {"at":"...","data":{...},"schema":1,"seq":42,"stream":"accelerator:GPU-0","type":"LeaseGranted","version":7}

`draft` does all that can be done before an event has its place; `Draft.leaf` then only splices the place in, so that
the transaction that gives the place stays short. `decode` knows the closed list `EVENT_TYPES` and nothing else: no
name in a leaf is ever imported.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from hashlib import sha256
from typing import Any, Final, cast

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaSerializer, SchemaValidator

from gpuledger.domain.events import EVENT_TYPES, Event, NewEvent, Recorded, StreamKind
from gpuledger.domain.ports import LedgerCorrupt
from gpuledger.domain.units import ID_PATTERN, MAX_INTEGER, format_instant, parse_instant

#: A reader holds one leaf at a time; this bounds it. Plans over a big fleet, our largest, take a few hundred KiB.
MAX_DATA_BYTES: Final = 16 * 2**20
#: The data with its envelope.
MAX_LEAF_BYTES: Final = MAX_DATA_BYTES + 2**10

#: Kinds with one stream, named by the kind alone (events.stream_name).
_ALONE: Final = frozenset({StreamKind.LEDGER, StreamKind.POLICY})
_IDENTIFIED: Final = "|".join(kind for kind in StreamKind if kind not in _ALONE)
_STREAM: Final = re.compile(rf"({'|'.join(_ALONE)})|({_IDENTIFIED}):{ID_PATTERN.strip('^$')}")

_NUMBER: Final = rb"([1-9][0-9]{0,15})"
# The grammar of an envelope. Its strings need no escapes, and what stands for `data` is parsed as JSON on its own: so
# whatever matches is one JSON object with these seven keys, each once and in this order.
_ENVELOPE: Final = re.compile(
    rb'\{"at":"([0-9TZ.:-]{27})","data":(\{.*\}),"schema":%b,"seq":%b,"stream":"([!-~]{1,220})"'
    rb',"type":"([A-Za-z]{1,60})","version":%b\}' % (_NUMBER, _NUMBER, _NUMBER)
)


class EventRefused(ValueError):
    """An event that must not enter the ledger: its value is outside the profile, or would not be read back."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


@dataclass(frozen=True, slots=True)
class Draft:
    """An event in canonical bytes, still without a place. `event` is the value as every later reader will get it."""

    stream: str
    type: str
    schema: int
    data: bytes
    event: Event

    def leaf(self, seq: int, version: int, at: int) -> bytes:
        """The leaf of this event at its place."""
        return _splice(at, self.data, self.schema, seq, self.stream, self.type, version)

    def recorded(self, seq: int, version: int, at: int) -> Recorded:
        """The event at its place."""
        return Recorded(seq=seq, at=at, stream=self.stream, version=version, data=self.event)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The parts of a leaf around its data, which is kept as bytes."""

    at: int
    data: bytes
    schema: int
    seq: int
    stream: str
    type: str
    version: int

    def leaf(self, data: bytes) -> bytes:
        """The leaf with this envelope."""
        return _splice(self.at, data, self.schema, self.seq, self.stream, self.type, self.version)


def leaf_hash(body: bytes) -> bytes:
    """The hash of a Merkle tree's leaf (RFC 6962, 2.1)."""
    return sha256(b"\x00" + body).digest()


def _splice(at: int, data: bytes, schema: int, seq: int, stream: str, name: str, version: int) -> bytes:
    return b'{"at":"%b","data":%b,"schema":%d,"seq":%d,"stream":"%b","type":"%b","version":%d}' % (
        format_instant(at).encode(),
        data,
        schema,
        seq,
        stream.encode(),
        name.encode(),
        version,
    )


def draft(new: NewEvent) -> Draft:
    """The canonical bytes of an event. Raises EventRefused, which names the path of the offending value.

    What is drafted was read back once: nothing can enter the ledger that would not come out of it the same. (In a
    document, JSON has no tuple, set or NaN: these would come back as something else.)
    """
    name = type(new.data).__name__
    entry = EVENT_TYPES.get(name)
    if entry is None or entry.data is not type(new.data):
        raise EventRefused(name, "is not in the closed list of event types")
    if _kind_of(new.stream) != entry.stream:
        raise EventRefused(name, f"does not belong into the stream {new.stream!r}")
    codec = _codec(name)
    data = codec.dump(new.data)
    if len(data) > MAX_DATA_BYTES:
        raise EventRefused(name, f"takes {len(data)} bytes, more than a leaf may have")
    try:
        event = codec.load(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise EventRefused(_path(name, first["loc"]), first["msg"]) from None
    if event != new.data:
        field = next(one.name for one in fields(event) if getattr(event, one.name) != getattr(new.data, one.name))
        raise EventRefused(f"{name}.{field}", "would be read back as another value")
    return Draft(new.stream, name, entry.schema, data, event)


def encode(recorded: Recorded) -> bytes:
    """The leaf of an event. Raises EventRefused."""
    return draft(NewEvent(recorded.stream, recorded.data)).leaf(recorded.seq, recorded.version, recorded.at)


def parse_envelope(body: bytes, seq: int | None = None) -> Envelope:
    """Take a leaf apart without reading its data. `seq`, when known, names the event in LedgerCorrupt."""
    match = _ENVELOPE.fullmatch(body)
    if match is None:
        raise LedgerCorrupt("is not the canonical envelope of an event", seq)
    at, data, schema, own_seq, stream, name, version = match.groups()
    try:
        envelope = Envelope(
            parse_instant(at.decode()), data, int(schema), int(own_seq), stream.decode(), name.decode(), int(version)
        )
    except ValueError as error:
        raise LedgerCorrupt(f"at: {error}", seq) from None
    seq = envelope.seq if seq is None else seq
    if envelope.seq != seq:
        raise LedgerCorrupt(f"says that it is event {envelope.seq}", seq)
    if max(envelope.seq, envelope.version) > MAX_INTEGER:
        raise LedgerCorrupt("has a number beyond 2^53 - 1", seq)
    _check_type(envelope)
    return envelope


def decode(body: bytes, seq: int | None = None, *, exact: bool = False) -> Recorded:
    """The event of a leaf. Raises LedgerCorrupt for all that `encode` would not have written.

    `exact` also encodes the event again and compares the bytes, for leaves that come from elsewhere; for those that we
    wrote, their hash says the same at a third of the cost.
    """
    envelope = parse_envelope(body, seq)
    codec = _codec(envelope.type)
    try:
        event = codec.load(envelope.data)
        if exact and envelope.leaf(codec.dump(event)) != body:
            raise LedgerCorrupt("is not in canonical form", envelope.seq)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise LedgerCorrupt(f"{_path(envelope.type, first['loc'])}: {first['msg']}", envelope.seq) from None
    except EventRefused as error:
        raise LedgerCorrupt(str(error), envelope.seq) from None
    return Recorded(envelope.seq, envelope.at, envelope.stream, envelope.version, event)


# ---- one type of event ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Codec:
    """Reads and writes the data of one type of event by its annotations."""

    name: str
    serializer: SchemaSerializer
    validator: SchemaValidator

    def dump(self, event: Event) -> bytes:
        try:
            # A value of another type than its field's is a mistake of ours: refused here, not written as it comes.
            tree = self.serializer.to_python(event, mode="json", warnings="error")
            _check(tree)
            return orjson.dumps(tree, option=orjson.OPT_SORT_KEYS)
        except _OutsideProfile as error:
            raise EventRefused(_path(self.name, error.path()), error.message) from None
        except (ValueError, orjson.JSONEncodeError, RecursionError) as error:
            # pydantic's: another type than the field's, no form in JSON, a circle; orjson's and Python's: too deep.
            raise EventRefused(self.name, " ".join(str(error).split())) from None

    def load(self, data: bytes) -> Event:
        return cast("Event", self.validator.validate_json(data, strict=True))


@cache
def _codec(name: str) -> _Codec:
    # Built at first use: forty adapters cost more than the start of a command that needs two of them.
    adapter: TypeAdapter[Any] = TypeAdapter(EVENT_TYPES[name].data)
    # Its two halves are used directly: the adapter's own methods add layers that cost as much as the work itself.
    return _Codec(name, adapter.serializer, cast("SchemaValidator", adapter.validator))


def _check_type(envelope: Envelope) -> None:
    entry = EVENT_TYPES.get(envelope.type)
    if entry is None:
        raise LedgerCorrupt(f"its type {envelope.type} is not one this release knows", envelope.seq)
    if envelope.schema != entry.schema:
        raise LedgerCorrupt(
            f"{envelope.type} has schema {envelope.schema}; this release knows {entry.schema}", envelope.seq
        )
    if _kind_of(envelope.stream) != entry.stream:
        raise LedgerCorrupt(f"{envelope.type} does not belong into the stream {envelope.stream!r}", envelope.seq)


def _kind_of(stream: str) -> str | None:
    """The kind of a stream by its name; None for what is no name of a stream."""
    match = _STREAM.fullmatch(stream)
    return match and (match[1] or match[2])


# ---- the profile ------------------------------------------------------------------------------------------------


class _OutsideProfile(Exception):
    """Found by `_check`; the steps to the value are added on the way out, so that the way in costs nothing."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.steps: list[str | int] = []

    def path(self) -> Iterator[str | int]:
        return reversed(self.steps)


def _check(value: Any) -> None:
    """Refuse what the profile of RFC 8785 leaves out (ledger.md, Bytes). `value` is a tree as of `json.loads`."""
    kind = cast("type[object]", type(value))
    if kind is str:
        _check_text(value)
    elif kind is int:
        if not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise _OutsideProfile("is an integer beyond 2^53 - 1")
    elif kind is dict:
        _check_items(value.items())
        for key in value:
            if type(key) is not str or not key.isascii():
                raise _OutsideProfile(f"has the key {key!r}; keys are ASCII")
    elif kind is list:
        _check_items(enumerate(cast("list[Any]", value)))
    elif value is not None and kind is not bool:
        raise _OutsideProfile(f"is a {kind.__name__}; a ledger holds strings, integers, booleans and null")


def _check_items(items: Iterable[tuple[str | int, Any]]) -> None:
    for step, item in items:
        # Most are these, and the others' call costs more than the check.
        if item is None or (type(item) is str and item.isascii()):
            continue
        try:
            _check(item)
        except _OutsideProfile as error:
            error.steps.append(step)
            raise


def _check_text(value: str) -> None:
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _OutsideProfile("has a lone surrogate") from None
    if not unicodedata.is_normalized("NFC", value):
        raise _OutsideProfile("is not in Unicode normal form NFC")


def _path(name: str, steps: Any) -> str:
    return ".".join([name, *map(str, steps)])
