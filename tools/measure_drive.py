"""Drive a runtime to what it can take at most: full context, full batch, every slot, many inputs.

How many words fill a context is asked of the runtime itself: it counts the tokens of two short prompts, the rest is a
straight line, and what it refuses is halved towards what it took. So this needs no tokenizer and fits every server
that speaks OpenAI's API.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any, Final

import httpx

from gpuledger.adapters.runtimes import checks
from gpuledger.adapters.runtimes.config import RuntimeConfig, Task
from gpuledger.domain.failures import Failure
from gpuledger.domain.ports import Endpoint, RuntimeFault

ANSWER_TOKENS: Final = 8
#: The number before a prompt makes it new to every cache; its tokens vary a little.
SLACK_TOKENS: Final = 4
DRIVE_LIMIT_SECONDS: Final = 3600.0
_FEW_WORDS: Final = 2


async def drive(endpoint: Endpoint, config: RuntimeConfig, progress: Callable[[str], None]) -> int:
    """Ask all that is to be asked; the tokens of the longest prompt that was taken. Raises RuntimeFault."""
    try:
        async with asyncio.timeout(DRIVE_LIMIT_SECONDS), checks.client() as http:
            driver = _Driver(http, endpoint, config)
            words, tokens = await driver.longest_prompt()
            progress("work: every slot at once")
            await asyncio.gather(*(driver.must_take(words) for _ in range(config.parallel)))
            if config.task is Task.EMBEDDING:
                progress(f"work: {config.max_inputs} inputs in one request")
                await driver.must_embed(config.max_inputs)
            return tokens
    except TimeoutError as error:
        raise RuntimeFault(Failure.TIMEOUT, "drive_timeout") from error
    except httpx.TransportError as error:
        raise RuntimeFault(Failure.HEALTHCHECK_FAILED, "no_answer", repr(error).encode()) from error


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

    async def must_embed(self, inputs: int) -> None:
        """Raises RuntimeFault when many short inputs in one request are refused."""
        answer = await self._post("/v1/embeddings", {"input": [f"input {index}" for index in range(inputs)]})
        if answer is None:
            raise RuntimeFault(Failure.HEALTHCHECK_FAILED, "inputs_refused")

    @property
    def _room(self) -> int:
        answer = 0 if self._config.task is Task.EMBEDDING else ANSWER_TOKENS
        return self._config.context_length - answer - SLACK_TOKENS

    async def _take(self, words: int) -> int | None:
        """The tokens that the runtime counted in a prompt of so many words; None when it refused."""
        prompt = " ".join([str(next(self._numbers)), *("word" for _ in range(words))])
        if self._config.task is Task.EMBEDDING:
            answer = await self._post("/v1/embeddings", {"input": prompt})
        else:
            question = {"messages": [{"role": "user", "content": prompt}], "max_tokens": ANSWER_TOKENS}
            answer = await self._post("/v1/chat/completions", question)
        return None if answer is None else int(answer["usage"]["prompt_tokens"])

    async def _post(self, path: str, document: object) -> dict[str, Any] | None:
        headers = {"Authorization": f"Bearer {self._endpoint.api_key}"}
        answer = await self._http.post(self._endpoint.base_url + path, json=document, headers=headers, timeout=None)
        if answer.status_code != 200:
            return None
        decoded: dict[str, Any] = json.loads(answer.content)
        return decoded
