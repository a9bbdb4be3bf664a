"""Drive a runtime to what it can take at most: full context, full batch, every slot, many inputs, pictures, recordings.

How many words fill a context is asked of the runtime itself: it counts the tokens of two short prompts, the rest is a
straight line, and what it refuses is halved towards what it took. So this needs no tokenizer and fits every server
that speaks OpenAI's API. What clients cannot send (more inputs, longer recordings than the deployment admits) is not
tried.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import wave
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import httpx

from gpuledger.adapters.runtimes import checks, samples
from gpuledger.adapters.runtimes.asking import OK, Answer, ask, client
from gpuledger.adapters.runtimes.config import RuntimeConfig, Task
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import Endpoint, RuntimeFault
from gpuledger.domain.units import MIB

ANSWER_TOKENS: Final = 8
#: The number before a prompt makes it new to every cache; its tokens vary a little.
SLACK_TOKENS: Final = 4
DRIVE_LIMIT_SECONDS: Final = 3600.0
#: Of a picture. Models that cut pictures of any size into patches take one of so many for about 1,400 tokens.
PICTURE_SIDE_PIXELS: Final = 1024
#: A recording that is refused is halved, down to this.
LEAST_AUDIO_BYTES: Final = 16_000
#: Of the operations, where a runtime has no other (`Endpoint.paths`).
_PATHS: Final = {
    "embeddings": "/v1/embeddings",
    "chat": "/v1/chat/completions",
    "transcription": "/v1/audio/transcriptions",
    "rerank": "/v1/rerank",
}
_FEW_WORDS: Final = 2
#: A batch of 2,048 embeddings of 4,096 numbers is about 180 MB of text.
MAX_ANSWER_BYTES: Final = 512 * MIB
#: What counts more tokens than any context has counts something else.
MAX_TOKENS: Final = 2**31 - 1


async def drive(endpoint: Endpoint, config: RuntimeConfig, progress: Callable[[str], None]) -> int:
    """Ask all that is to be asked; the tokens of the longest prompt that was taken, 0 of what takes no prompts.

    Raises RuntimeFault.
    """
    try:
        async with asyncio.timeout(DRIVE_LIMIT_SECONDS), client() as http:
            driver = _Driver(http, endpoint, config)
            if config.task is Task.TRANSCRIPTION:
                await _drive_recordings(driver, config, progress)
                return 0
            return await _drive_prompts(driver, config, progress)
    except TimeoutError as error:
        raise RuntimeFault(Failure.TIMEOUT, "drive_timeout") from error
    except httpx.TransportError as error:
        raise RuntimeFault(Failure.HEALTHCHECK_FAILED, checks.NO_ANSWER, repr(error).encode()) from error


async def _drive_prompts(driver: _Driver, config: RuntimeConfig, progress: Callable[[str], None]) -> int:
    words, tokens = await driver.longest_prompt()
    progress("work: every slot at once")
    await asyncio.gather(*(driver.must_take(words) for _ in range(config.parallel)))
    if config.task is Task.EMBEDDING or config.task is Task.RERANK:
        progress(f"work: {config.max_inputs} inputs in one request")
        await driver.must_take_many(config.max_inputs)
    if config.max_images:
        progress(f"work: {config.max_images} pictures in one request, every slot at once")
        png = await asyncio.to_thread(samples.picture, PICTURE_SIDE_PIXELS)
        await asyncio.gather(*(driver.must_see(png, config.max_images) for _ in range(config.parallel)))
    return tokens


async def _drive_recordings(driver: _Driver, config: RuntimeConfig, progress: Callable[[str], None]) -> None:
    length = await driver.longest_recording(config.max_audio_bytes)
    progress("work: every slot at once")
    await asyncio.gather(*(driver.must_hear(length) for _ in range(config.parallel)))


class _Driver:
    def __init__(self, http: httpx.AsyncClient, endpoint: Endpoint, config: RuntimeConfig) -> None:
        self._http = http
        self._endpoint = endpoint
        self._config = config
        self._numbers = itertools.count(1001)

    async def longest_prompt(self) -> tuple[int, int]:
        """Words and tokens of the longest prompt that is taken, to about one in a hundred."""
        more_words = max(_FEW_WORDS + 1, self._config.context_length // 8)
        few, more = await self.must_take(_FEW_WORDS), await self.must_take(more_words)
        taken_words, taken_tokens = (more_words, more)
        per_word = max(0.1, (more - few) / (more_words - _FEW_WORDS))
        refused = max(more_words + 1, int(_FEW_WORDS + (self._room - few) / per_word)) + 1
        words = refused - 1
        while words > taken_words:
            tokens = await self._take(words)
            if tokens is None:
                refused = words
            else:
                taken_words, taken_tokens = words, tokens
            if refused - taken_words <= 1 + taken_words // 100:
                break
            words = (taken_words + refused) // 2
        return taken_words, taken_tokens

    async def must_take(self, words: int) -> int:
        """The tokens of a prompt that has to be taken. Raises RuntimeFault."""
        while (tokens := await self._take(words)) is None:
            if words <= 1:
                raise RuntimeFault(Failure.HEALTHCHECK_FAILED, "prompt_refused")
            words -= 1 + words // 100
        return tokens

    async def must_take_many(self, inputs: int) -> None:
        """Raises RuntimeFault when many short inputs in one request are refused."""
        texts = [f"input {index}" for index in range(inputs)]
        if self._config.task is Task.RERANK:
            answer = await self._post("rerank", {"query": "input", "documents": texts})
        else:
            answer = await self._post("embeddings", {"input": texts})
        if answer is None:
            raise RuntimeFault(Failure.HEALTHCHECK_FAILED, "inputs_refused")

    async def must_see(self, png: bytes, pictures: int) -> None:
        """As many pictures in one question as clients may send, fewer where the context does not hold them."""
        part = {"type": "image_url", "image_url": {"url": samples.data_url(png)}}
        while pictures > 0:
            content = [{"type": "text", "text": self._prompt(_FEW_WORDS)}, *(part for _ in range(pictures))]
            if await self._post("chat", self._question(content)) is not None:
                return
            pictures //= 2
        raise RuntimeFault(Failure.HEALTHCHECK_FAILED, "pictures_refused")

    async def longest_recording(self, limit_bytes: int) -> int:
        """Of those that are a half, a quarter, ... of what clients may send: the longest that is taken."""
        length = limit_bytes
        while not await self._hear(length):
            length //= 2
            if length < LEAST_AUDIO_BYTES:
                raise RuntimeFault(Failure.HEALTHCHECK_FAILED, "recording_refused")
        return length

    async def must_hear(self, length_bytes: int) -> None:
        """Raises RuntimeFault when a recording that was taken alone is refused among others."""
        if not await self._hear(length_bytes):
            raise RuntimeFault(Failure.HEALTHCHECK_FAILED, "recording_refused")

    @property
    def _room(self) -> int:
        answer = ANSWER_TOKENS if self._config.task is Task.CHAT else 0
        return self._config.context_length - answer - SLACK_TOKENS

    async def _take(self, words: int) -> int | None:
        """The tokens that the runtime counted in a prompt of so many words; None when it refused."""
        prompt = self._prompt(words)
        match self._config.task:
            case Task.EMBEDDING:
                answer = await self._post("embeddings", {"input": prompt})
            case Task.RERANK:
                answer = await self._post("rerank", {"query": "word", "documents": [prompt]})
            case _:
                answer = await self._post("chat", self._question(prompt))
        return None if answer is None else _prompt_tokens(answer, words)

    def _prompt(self, words: int) -> str:
        return " ".join([str(next(self._numbers)), *("word" for _ in range(words))])

    def _question(self, content: object) -> Mapping[str, object]:
        return {"messages": [{"role": "user", "content": content}], "max_tokens": ANSWER_TOKENS}

    async def _hear(self, length_bytes: int) -> bool:
        recording = await asyncio.to_thread(_recording, length_bytes)
        file = {"file": ("recording.wav", recording, "audio/wav")}
        form = {**self._config.manners.check_fields, "response_format": "json"}
        answer = await self._send("transcription", data=form, files=file)
        return answer.status == OK

    async def _post(self, operation: str, document: Mapping[str, object]) -> dict[str, Any] | None:
        """What it answered; None when it refused. Raises RuntimeFault for an answer that is none.

        What its functional check is told besides (the name of the model) it is told here too.
        """
        answer = await self._send(operation, json={**self._config.manners.check_fields, **document})
        if answer.status != OK:
            return None
        try:
            decoded = json.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise RuntimeFault(Failure.INVALID_OUTPUT, "answer_malformed", answer.body) from error
        if not isinstance(decoded, dict):
            raise RuntimeFault(Failure.INVALID_OUTPUT, "answer_malformed", answer.body)
        return cast("dict[str, Any]", decoded)

    async def _send(self, operation: str, **content: Any) -> Answer:
        path = self._endpoint.paths.get(operation, _PATHS[operation])
        answer = await ask(self._http, self._endpoint, "POST", path, MAX_ANSWER_BYTES, **content)
        if not answer.whole:
            raise RuntimeFault(Failure.INVALID_OUTPUT, "answer_too_long")
        return answer


def _prompt_tokens(answer: Mapping[str, Any], words: int) -> int:
    """What it counted, or the words where it does not say: servers of rerankers may not."""
    usage = answer.get("usage")
    counted: Mapping[str, object] = cast("Mapping[str, object]", usage) if isinstance(usage, Mapping) else {}
    for name in ("prompt_tokens", "total_tokens"):
        count = counted.get(name)
        if isinstance(count, int) and 0 < count <= MAX_TOKENS:
            return count
    return words


def _recording(length_bytes: int) -> bytes:
    """A tone of about so many bytes, as a WAV file."""
    with wave.open(io.BytesIO(samples.tone(1000))) as one:
        shape, second = one.getparams(), one.readframes(one.getnframes())
    file = io.BytesIO()
    with wave.open(file, "wb") as longer:
        longer.setparams(shape)
        longer.writeframes((second * -(-length_bytes // len(second)))[: length_bytes // 2 * 2])
    return file.getvalue()
