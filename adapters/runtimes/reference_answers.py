"""What the reference runtime answers: everything follows from the SHA-256 of what it was asked.

Tokens are words, and an image is one. The same question gets the same answer, in every process.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from .reference_http import Refusal, a_list, a_text, an_object

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jade", "larch", "mesa")
#: Scores have six decimals: as many as a float of single precision has.
_SCORES = 10**6
_DATA_URL = "data:image/"


@dataclass(frozen=True)
class Prompt:
    """What a completion is made of. `images`: how many came with it; what they show is part of `text`, by its hash."""

    text: str
    tokens: int
    images: int = 0


def vector(text: str, dimensions: int) -> list[float]:
    """A unit vector."""
    words = struct.unpack(f"<{dimensions}H", hashlib.shake_256(text.encode()).digest(2 * dimensions))
    values = [word - 32767.5 for word in words]
    norm = math.sqrt(sum(value * value for value in values))
    return [value / norm for value in values]


def score(query: str, document: str) -> float:
    """From 0 to 1, the same for the same pair."""
    digest = hashlib.sha256(f"{len(query)} {query} {document}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _SCORES / _SCORES


def words(prompt: str, count: int) -> Iterator[str]:
    block = b""
    for index in range(count):
        place = index % hashlib.sha256().digest_size
        if place == 0:
            block = hashlib.sha256(f"{index} {prompt}".encode()).digest()
        yield WORDS[block[place] % len(WORDS)] + " "


def tokens_of(prompt: Prompt, count: int) -> Iterator[str]:
    """The words of an answer; of one to images the first says how many it was shown."""
    for index, word in enumerate(words(prompt.text, count)):
        yield f"[{prompt.images} images] " if prompt.images and index == 0 else word


def transcription(recording: memoryview, count: int) -> str:
    """So many bytes were heard, and these words in them."""
    digest = hashlib.sha256(recording).hexdigest()
    return f"{len(recording)} bytes: {''.join(words(digest, count))}".rstrip()


def chat_prompt(messages: list[Any], max_images: int) -> Prompt:
    """Raises Refusal for what is no message, for too many images, and for an image that is not in the request."""
    texts, images = list[str](), list[str]()
    for message in map(an_object, messages):
        content: object = message.get("content")
        if isinstance(content, str):
            texts.append(content)
            continue
        parts = [an_object(part) for part in a_list(content)]
        texts.append(" ".join(a_text(part.get("text", "")) for part in parts if part.get("type") != "image_url"))
        shown = [_image(part) for part in parts if part.get("type") == "image_url"]
        texts[-1] = " ".join([texts[-1], *shown]) if shown else texts[-1]
        images += shown
    if len(images) > max_images:
        raise Refusal(400, f"{len(images)} images are more than the {max_images} that a request may bring")
    text = "\n".join(texts)
    return Prompt(text, len(text.split()), len(images))


def _image(part: dict[str, Any]) -> str:
    """The hash of an image: a word, which stands for it in the prompt."""
    url = a_text(an_object(part.get("image_url")).get("url"))
    head, _, content = url.partition(",")
    if not head.startswith(_DATA_URL) or not head.endswith(";base64"):
        raise Refusal(400, "an image has to be in the request, as a data: URL in base64")
    try:
        return hashlib.sha256(base64.b64decode(content, validate=True)).hexdigest()
    except ValueError:
        raise Refusal(400, "an image is not base64") from None


def packed(values: list[float]) -> str:
    """A vector as `encoding_format: base64` has it."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


@dataclass(frozen=True)
class Answer:
    """One completion in the two shapes of the OpenAI API, whole and in chunks."""

    chat: bool
    model: str
    name: str
    finish: str
    usage: dict[str, int]

    def whole(self, text: str) -> dict[str, Any]:
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "finish_reason": self.finish}
        return {**self._envelope("chat.completion"), "choices": [choice], "usage": self.usage}

    async def chunks(self, tokens: AsyncIterator[str], with_usage: bool) -> AsyncIterator[object]:
        if self.chat:
            yield self._chunk({"role": "assistant", "content": ""}, None)
        async for token in tokens:
            yield self._chunk({"content": token}, None)
        yield self._chunk({}, self.finish)
        if with_usage:
            yield {**self._envelope("chat.completion.chunk"), "choices": [], "usage": self.usage}

    def _chunk(self, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **said, "finish_reason": finish}
        return {**self._envelope("chat.completion.chunk"), "choices": [choice]}

    def _envelope(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.name}",
            "object": kind if self.chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }
