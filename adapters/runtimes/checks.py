"""Is it ready, does it work, what runs: the questions that are asked of a runtime over HTTP.

A process that answers /health may still serve nonsense, so real requests are made and their answers are looked at:
by kind, or by the JSON schema that the operator gives in the place of that.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import httpx
import jsonschema
import referencing
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from pydantic import BaseModel, Field, ValidationError
from referencing.exceptions import Unresolvable

from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import Endpoint, RuntimeFault
from gpuledger.domain.units import MIB

from . import asking, samples
from .asking import OK
from .engine import Json
from .options import RuntimeOptions, Task

#: The detail of a fault when the connection failed: as it does when the process is about to end.
NO_ANSWER: Final = "no_answer"
HEALTH_PATH: Final = "/health"
METRICS_PATH: Final = "/metrics"
#: An honest answer to these questions is a few hundred KiB at most (two vectors of 16,384 numbers).
MAX_ANSWER_BYTES: Final = 8 * MIB
#: A page of vLLM's with every model and every histogram is some 100 KiB.
MAX_METRICS_BYTES: Final = 4 * MIB
#: A page that takes longer says what was.
METRICS_TIMEOUT_SECONDS: Final = 2.0
#: Of a server that took a connection: then it is asked again.
_SILENCE_SECONDS: Final = 10.0
_FIRST_POLL_SECONDS: Final = 0.005
_LAST_POLL_SECONDS: Final = 0.1
#: Two that differ: a server that answers everything alike is broken too.
_PROBES: Final = ("memory", "a ledger of what was lent")
_PROBE_TOKENS: Final = 8

_Judge: TypeAlias = Callable[[bytes], None]
_Answer = TypeVar("_Answer", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Probe:
    """How a runtime is asked where that is not as OpenAI's API has it.

    `path`: in place of that of the task. `fields`: added to the document or the form, and in place of ours of the same
    name; the name of the model, for a server that insists on it. What answers differently needs a `check_schema`.
    """

    path: str | None = None
    fields: Mapping[str, Json] = field(default_factory=dict[str, Json])


OPENAI: Final = Probe()


@dataclass(frozen=True, slots=True)
class _Question:
    """One request and what makes its answer one. `recording`: it is a form, with this file."""

    path: str
    document: Mapping[str, Json]
    judge: _Judge
    recording: bytes | None = None


class _Vector(BaseModel):
    index: int
    embedding: Annotated[list[float], Field(min_length=1)]


class _Embeddings(BaseModel):
    data: list[_Vector]


class _Message(BaseModel):
    """What a model thinks is an answer too: a few tokens may not reach beyond it. Servers name it differently."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(BaseModel):
    message: _Message


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1)]


class _Transcription(BaseModel):
    text: str


class _Rank(BaseModel):
    index: int
    relevance_score: float


class _Ranking(BaseModel):
    results: list[_Rank]


async def until_ready(http: httpx.AsyncClient, endpoint: Endpoint, path: str = HEALTH_PATH) -> None:
    """Wait until `path` answers 200, for ever if need be: the caller bounds it. What else it says is not read."""
    pause = _FIRST_POLL_SECONDS
    while True:
        try:
            answer = await asking.ask(http, endpoint, "GET", path, 0, _SILENCE_SECONDS)
            if answer.status == OK:
                return
        except httpx.TransportError:
            pass  # It does not listen yet.
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_SECONDS)


async def check(http: httpx.AsyncClient, endpoint: Endpoint, options: RuntimeOptions, probe: Probe = OPENAI) -> None:
    """Make the functional requests of the task and look at the answers: by kind, or by `check_schema` instead.

    Raises RuntimeFault: HEALTHCHECK_FAILED when there is no answer, INVALID_OUTPUT when it is not one.
    """
    for question in _questions(options):
        body = await _ask(http, endpoint, question, probe)
        if options.check_schema is None:
            question.judge(body)
        else:
            _check_schema(options.check_schema, body)


async def metrics(http: httpx.AsyncClient, endpoint: Endpoint, path: str = METRICS_PATH) -> str | None:
    """What it answers at `path`; None when it does not, in time and within bounds."""
    try:
        async with asyncio.timeout(METRICS_TIMEOUT_SECONDS):
            answer = await asking.ask(http, endpoint, "GET", path, MAX_METRICS_BYTES)
    except (httpx.TransportError, TimeoutError):
        return None
    return answer.body.decode("utf-8", "replace") if answer.status == OK and answer.whole else None


# ---- questions --------------------------------------------------------------------------------------------------


def _questions(options: RuntimeOptions) -> Iterator[_Question]:
    """Of a chat that takes images two: a model may read and be blind."""
    match options.task:
        case Task.EMBEDDING:
            judge = partial(_check_embeddings, dimensions=options.dimensions)
            yield _Question("/v1/embeddings", {"input": list(_PROBES)}, judge)
        case Task.CHAT:
            yield _chat(_PROBES[0])
            if options.max_images > 0:
                image: Json = {"type": "image_url", "image_url": {"url": samples.data_url(samples.picture())}}
                yield _chat([{"type": "text", "text": _PROBES[0]}, image])
        case Task.TRANSCRIPTION:
            form = {"response_format": "json"}
            yield _Question("/v1/audio/transcriptions", form, _check_transcription, samples.tone())
        case Task.RERANK:
            documents = {"query": _PROBES[0], "documents": list(_PROBES)}
            yield _Question("/v1/rerank", documents, _check_ranking)


def _chat(content: Json) -> _Question:
    messages: Json = [{"role": "user", "content": content}]
    document: dict[str, Json] = {"messages": messages, "max_tokens": _PROBE_TOKENS, "temperature": 0}
    return _Question("/v1/chat/completions", document, _check_completion)


async def _ask(http: httpx.AsyncClient, endpoint: Endpoint, question: _Question, probe: Probe) -> bytes:
    document = {**question.document, **probe.fields}
    if question.recording is None:
        content: dict[str, Any] = {"json": document}
    else:
        content = {"data": document, "files": {"file": ("probe.wav", question.recording, "audio/wav")}}
    try:
        # No time limit of its own: that of the load holds.
        answer = await asking.ask(http, endpoint, "POST", probe.path or question.path, MAX_ANSWER_BYTES, **content)
    except httpx.TransportError as error:
        raise RuntimeFault(Failure.HEALTHCHECK_FAILED, NO_ANSWER, repr(error).encode()) from error
    if answer.status != OK:
        raise RuntimeFault(Failure.HEALTHCHECK_FAILED, f"http_status_{answer.status}", answer.body)
    if not answer.whole:
        raise RuntimeFault(Failure.INVALID_OUTPUT, "answer_too_long", answer.body)
    return answer.body


# ---- answers ----------------------------------------------------------------------------------------------------


def _check_embeddings(body: bytes, dimensions: int | None) -> None:
    vectors = _read(_Embeddings, body, "embedding_malformed").data
    if [vector.index for vector in vectors] != list(range(len(_PROBES))):
        raise RuntimeFault(Failure.INVALID_OUTPUT, "embedding_count", body)
    first, second = (vector.embedding for vector in vectors)
    if len(first) != len(second) or dimensions not in (None, len(first)):
        raise RuntimeFault(Failure.INVALID_OUTPUT, "embedding_length", body)
    if first == second or not all(_says_something(vector) for vector in (first, second)):
        raise RuntimeFault(Failure.INVALID_OUTPUT, "embedding_degenerate", body)


def _says_something(vector: Sequence[float]) -> bool:
    return _all_finite(vector) and (len(vector) == 1 or min(vector) != max(vector))


def _all_finite(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _check_completion(body: bytes) -> None:
    message = _read(_Completion, body, "completion_malformed").choices[0].message
    if not (message.content or message.reasoning_content or message.reasoning):
        raise RuntimeFault(Failure.INVALID_OUTPUT, "completion_empty", body)


def _check_transcription(body: bytes) -> None:
    """There is a text. It may be empty: a speech model that hears nobody in a tone is right."""
    _read(_Transcription, body, "transcription_malformed")


def _check_ranking(body: bytes) -> None:
    """Each document once, in whatever order, and not all worth the same."""
    results = _read(_Ranking, body, "rerank_malformed").results
    if sorted(rank.index for rank in results) != list(range(len(_PROBES))):
        raise RuntimeFault(Failure.INVALID_OUTPUT, "rerank_count", body)
    scores = [rank.relevance_score for rank in results]
    if not _all_finite(scores) or min(scores) == max(scores):
        raise RuntimeFault(Failure.INVALID_OUTPUT, "rerank_degenerate", body)


def _read(shape: type[_Answer], body: bytes, detail: str) -> _Answer:
    try:
        return shape.model_validate_json(body)
    except ValidationError as error:
        raise RuntimeFault(Failure.INVALID_OUTPUT, detail, body) from error


def _check_schema(schema: Mapping[str, Any], body: bytes) -> None:
    """By a registry that is empty: nothing is fetched, whatever the schema refers to."""
    kind: type[Validator] = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RuntimeFault(Failure.INVALID_OUTPUT, "schema_violated", body) from error
    try:
        satisfied = kind(dict(schema), registry=referencing.Registry()).is_valid(answer)
    except (Unresolvable, RecursionError, re.error, ArithmeticError, ValueError, TypeError) as error:
        # What only shows when an answer is judged: a reference to nothing or to itself, a pattern that is none, a
        # number in the answer that cannot be divided (infinite, not one, beyond every float).
        raise RuntimeFault(Failure.INVALID_OUTPUT, "schema_unusable", repr(error).encode()) from error
    if not satisfied:
        raise RuntimeFault(Failure.INVALID_OUTPUT, "schema_violated", body)
