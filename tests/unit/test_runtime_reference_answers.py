"""What the reference runtime answers about images, recordings and rankings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuledger.adapters.runtimes import samples
from tests.unit.references import loaded

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/transcriptions"
RERANK = "/v1/rerank"
FORM = {"Content-Type": "multipart/form-data; boundary=x"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def message_of(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    text: str = answer.json()["error"]["message"]
    return text


# ---- images -----------------------------------------------------------------------------------------------------


def shown(*images: bytes) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": samples.data_url(image)}} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}


def linked(url: object) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": url}]}


async def test_an_answer_says_how_many_images_it_was_shown(tmp_path: Path) -> None:
    one, two = samples.picture(2), samples.picture(3)
    async with loaded(tmp_path, task="chat", max_images=2, tokens=5) as runtime:

        async def say(*images: bytes) -> str:
            answer = await runtime.ask(CHAT, messages=[shown(*images)])
            text: str = answer.json()["choices"][0]["message"]["content"]
            return text

        answer = await say(one, two)
        assert answer.startswith("[2 images] ")
        assert len(answer.split()) == 2 + 4
        assert answer == await say(one, two)
        assert answer != await say(two, one)
        assert (await say(one)).startswith("[1 images] ")
        assert not (await say()).startswith("[")


async def test_images_that_cannot_be_are_refused(tmp_path: Path) -> None:
    image = samples.picture(1)
    async with loaded(tmp_path, task="chat", max_images=2) as runtime:

        async def refusal(*messages: object) -> str:
            return message_of(await runtime.ask(CHAT, messages=messages))

        assert "3 images are more than the 2" in await refusal(shown(image, image, image))
        assert "3 images are more than the 2" in await refusal(shown(image), shown(image, image))
        assert "data: URL" in await refusal(linked({"url": "https://example.org/a.png"}))
        assert "not base64" in await refusal(linked({"url": "data:image/png;base64,*"}))
        assert "object was expected" in await refusal(linked("data:image/png;base64,AAAA"))


# ---- recordings -------------------------------------------------------------------------------------------------


def field(name: str, content: bytes) -> bytes:
    return f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + content + b"\r\n"


async def test_a_transcription_is_of_the_bytes_of_the_recording(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="transcription", tokens=3) as runtime:

        async def say(recording: bytes, **fields: str) -> httpx.Response:
            return await runtime.http.post(SPEECH, data=fields, files={"file": ("a.wav", recording, "audio/wav")})

        first, other = await say(samples.tone(), model="m"), await say(samples.tone(300))
        plain = await say(samples.tone(), response_format="text")
        awkward = b"\r\n--\r\n\r\n--x--\r\n"
        assert (await say(awkward)).json()["usage"]["audio_bytes"] == len(awkward)
        assert (await say(b"")).json()["text"].startswith("0 bytes: ")
    text = first.json()["text"]
    assert text.startswith(f"{len(samples.tone())} bytes: ")
    assert len(text.split()) == 2 + 3
    assert text.split()[2:] != other.json()["text"].split()[2:]
    assert plain.text == text
    assert first.json()["usage"] == {"type": "bytes", "audio_bytes": len(samples.tone())}


async def test_a_recording_may_come_in_chunks(tmp_path: Path) -> None:
    """As a gateway relays it that does not wait for its end."""
    recording = samples.tone(1_000)
    content = b'--two words\r\nContent-Disposition: form-data; filename="a.wav"; name="file"\r\n\r\n' + recording
    content += b"\r\n--two words--\r\n"
    headers = {"Content-Type": 'multipart/form-data; boundary="two words"'}

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 1_111):
            yield content[start : start + 1_111]

    async with loaded(tmp_path, task="transcription") as runtime:
        whole = await runtime.http.post(SPEECH, files={"file": ("a.wav", recording)})
        chunked = await runtime.http.post(SPEECH, content=pieces(), headers=headers)
        again = await runtime.http.post(SPEECH, content=pieces(), headers=headers)
    assert chunked.json()["text"] == again.json()["text"] == whole.json()["text"]


async def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    most = len(samples.tone())
    async with loaded(tmp_path, task="transcription", max_audio_bytes=most) as runtime:

        async def refusal(content: bytes, headers: dict[str, str] = FORM) -> str:
            return message_of(await runtime.http.post(SPEECH, content=content, headers=headers))

        given = field("file", b"a")
        assert "not a multipart form" in await refusal(b"{}", {"Content-Type": "application/json"})
        assert "has no name" in await refusal(b"--x\r\nA: b\r\n\r\n\r\n--x--\r\n")
        assert "cut off" in await refusal(given)
        assert "cut off" in await refusal(given + b"--x\r\nContent-Disp")
        assert "cut off" in await refusal(b"")
        assert "file: is missing" in await refusal(b"--x--\r\n")
        assert "file: is missing" in await refusal(field("model", b"m") + b"--x--")
        assert "response_format" in await refusal(given + field("response_format", b"srt") + b"--x--")
        assert "one piece" in await refusal(given + field("stream", b"true") + b"--x--")
        long = await runtime.http.post(SPEECH, content=field("file", b"a" * (most + 1)) + b"--x--", headers=FORM)
        assert (long.status_code, str(most) in long.text) == (413, True)


# ---- rankings ---------------------------------------------------------------------------------------------------


async def test_a_ranking_scores_each_pair_the_best_first(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="rerank") as runtime:
        question: dict[str, Any] = {"query": "q", "documents": ["a", "b", {"text": "c"}, "a"], "model": "m"}
        answer = (await runtime.ask(RERANK, **question)).json()
        best = (await runtime.ask(RERANK, **question, top_n=1)).json()
        other = (await runtime.ask(RERANK, **{**question, "query": "p"})).json()
    results = answer["results"]
    scores = {one["index"]: one["relevance_score"] for one in results}
    assert sorted(scores) == [0, 1, 2, 3]
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert scores[0] == scores[3] != scores[1] != scores[2]
    assert all(0 <= score < 1 for score in scores.values())
    assert best["results"] == results[:1]
    assert other["results"] != results
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}


async def test_what_cannot_be_ranked_is_refused(tmp_path: Path) -> None:
    async with loaded(tmp_path, task="rerank", context_length=12) as runtime:

        async def refusal(**document: object) -> str:
            return message_of(await runtime.ask(RERANK, **document))

        assert "string was expected" in await refusal(documents=["a"])
        assert "documents is empty" in await refusal(query="q", documents=[])
        assert "string was expected" in await refusal(query="q", documents=[{"title": "a"}])
        assert "object was expected" in await refusal(query="q", documents=[1])
        assert "top_n" in await refusal(query="q", documents=["a"], top_n=0)
        assert "13 tokens" in await refusal(query="q", documents=["w " * 12])
