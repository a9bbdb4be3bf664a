"""Audio files as forms: what is taken, held to its bounds and sent on, whatever a client writes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuledger.adapters.http import forms, spool
from gpuledger.adapters.http.openai_errors import ApiError
from gpuledger.adapters.http.ports import Refused
from gpuledger.adapters.http.spool import MEMORY_BYTES, Spool
from gpuledger.domain.failures import Failure
from gpuledger.domain.reasons import Reason
from tests.unit.gateways import MAX_AUDIO_BYTES, SERVICES, Door, answer_of, content_of, door, granted

pytestmark = pytest.mark.anyio

PATH = "/v1/audio/transcriptions"
WAV = b"RIFF" + bytes(range(256)) * 8
NAMED = '; filename="a.wav"'
FIELDS: dict[str, Any] = {"model": "ears@1", "language": "en", "temperature": "0.2", "response_format": "json"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def send(
    gate: Door, file: bytes = WAV, name: str = "speech.WAV", headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    upload = {"file": (name, file, "audio/wav")}
    return await gate.http.post(PATH, data={**FIELDS, **fields}, files=upload, headers=headers)


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


async def send_raw(gate: Door, body: bytes, kind: str = "multipart/form-data; boundary=b") -> httpx.Response:
    return await gate.http.post(PATH, content=body, headers={"Content-Type": kind})


def taken_apart(request: httpx.Request) -> dict[str, tuple[bytes, bytes]]:
    """Parts of a form that was sent to a runtime: head and content of each, by its name."""
    boundary = request.headers["content-type"].partition("boundary=")[2].encode()
    found: dict[str, tuple[bytes, bytes]] = {}
    for piece in request.content.split(b"--" + boundary)[1:-1]:
        head, _, content = piece.strip(b"\r\n").partition(b"\r\n\r\n")
        found[head.partition(b'name="')[2].partition(b'"')[0].decode()] = head, content
    return found


class TestRelay:
    async def test_the_runtime_gets_the_file_and_the_fields_and_nothing_else(self) -> None:
        async with door() as gate:
            answer = await send(gate)
        assert answer.status_code == 200
        (sent,) = gate.sent
        assert sent.url.path == PATH
        assert int(sent.headers["content-length"]) == len(sent.content)
        assert "transfer-encoding" not in sent.headers
        parts = taken_apart(sent)
        assert {name: content for name, (_, content) in parts.items() if name != "file"} == {
            name: value.encode() for name, value in FIELDS.items()
        }
        head, content = parts["file"]
        assert content == WAV
        assert b'filename="audio.wav"' in head
        assert b"Content-Type: audio/wav" in head

    async def test_the_scheduler_gets_sizes(self) -> None:
        async with door() as gate:
            await send(gate, prompt="a secret")
        (asked,) = gate.desk.asked
        assert (asked.operation, asked.capability) == ("transcription", "ears@1")
        assert asked.body_bytes == len(gate.sent[0].content)
        assert "secret" not in repr(asked)

    @pytest.mark.parametrize(
        ("format_", "kind", "text"),
        [
            ("text", "text/plain; charset=utf-8", '{"model": "spoken"}'),
            ("srt", "text/plain", "1\n00:00:00,000 --> ..."),
        ],
    )
    async def test_text_passes_as_it_is(self, format_: str, kind: str, text: str) -> None:
        async def answer(_: httpx.Request) -> httpx.Response:
            return content_of(200, kind, text.encode())

        async with door(answer) as gate:
            got = await send(gate, response_format=format_)
        assert (got.text, got.headers["content-type"]) == (text, kind)

    async def test_usage_is_noted_by_its_other_names(self) -> None:
        async def answer(_: httpx.Request) -> httpx.Response:
            return answer_of(200, {"text": "hello", "usage": {"input_tokens": 14, "output_tokens": 3}})

        async with door(answer) as gate:
            await send(gate)
        (ending,) = gate.desk.ended
        assert (ending.prompt_tokens, ending.completion_tokens) == (14, 3)

    async def test_it_is_streamed_when_it_was_asked_for(self) -> None:
        events = b'data: {"type": "transcript.text.delta", "delta": "he"}\n\ndata: [DONE]\n\n'

        async def answer(request: httpx.Request) -> httpx.Response:
            assert taken_apart(request)["stream"][1] == b"true"
            return content_of(200, "text/event-stream", events)

        async with door(answer) as gate:
            got = await send(gate, stream="true")
        assert got.content == events

    async def test_a_second_attempt_sends_the_same(self) -> None:
        big = os.urandom(MEMORY_BYTES + 100_000)
        answers = [answer_of(500, {}), answer_of(200, {"text": "hello"})]

        async def runtime(_: httpx.Request) -> httpx.Response:
            return answers.pop(0)

        async with door(runtime) as gate:
            gate.desk.outcomes = [granted(), granted(2)]
            assert (await send(gate, big)).status_code == 200
        first, second = gate.sent
        assert first.content == second.content
        assert taken_apart(second)["file"][1] == big


class TestNames:
    """A request that its client names: the same content however it was framed."""

    async def test_its_content_is_sealed(self) -> None:
        key = {"Idempotency-Key": "k"}
        async with door() as gate:
            await send(gate, headers=key)
            await send(gate, headers=key)
            await send(gate, WAV + b"x", headers=key)
            await send(gate, headers=key, prompt="other")
            await send(gate)
        first, same, other_file, other_field, unnamed = gate.desk.asked
        assert first == same
        assert len({one.content_mac for one in (first, other_file, other_field)}) == 3
        assert len({one.request_id for one in (first, other_file, other_field)}) == 1
        assert unnamed.content_mac is None


class TestKeeping:
    async def test_a_large_file_has_no_name_and_no_reader_but_us(self, tmp_path: Path) -> None:
        kept = Spool(tmp_path).open()
        data = os.urandom(MEMORY_BYTES + 1)
        for start in range(0, len(data), 50_000):
            await kept.write(data[start : start + 50_000])
        assert list(tmp_path.iterdir()) == []
        (descriptor,) = [fd for fd in open_files() if fd.startswith(str(tmp_path))]
        assert "(deleted)" in descriptor
        assert b"".join([chunk async for chunk in kept.chunks(64 * 1024)]) == data
        kept.close()
        kept.close()
        assert [fd for fd in open_files() if fd.startswith(str(tmp_path))] == []

    async def test_all_together_have_a_bound(self, tmp_path: Path) -> None:
        together = Spool(tmp_path, total_bytes=100)
        first, second = together.open(), together.open()
        await first.write(b"x" * 60)
        with pytest.raises(ApiError) as error:
            await second.write(b"x" * 60)
        assert (error.value.status, error.value.code) == (429, "too_many_open_requests")
        first.close()
        await second.write(b"x" * 60)
        second.close()
        assert together.held_bytes == 0

    async def test_a_disk_that_takes_nothing_is_told_and_leaves_nothing(self, tmp_path: Path) -> None:
        together = Spool(tmp_path / "absent")
        kept = together.open()
        with pytest.raises(ApiError) as error:
            await kept.write(b"x" * (MEMORY_BYTES + 1))
        assert (error.value.status, error.value.code) == (503, "upload_not_kept")
        kept.close()
        assert together.held_bytes == 0

    @pytest.mark.parametrize("ends", ["served", "refused", "failed", "bad", "too_large"])
    async def test_nothing_is_kept_after_the_end(self, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
        spools: list[Spool] = []
        monkeypatch.setattr(Spool, "open", remembering(spools, Spool.open))
        file = os.urandom(MEMORY_BYTES + 5)
        async with door() as gate:
            if ends == "refused":
                gate.desk.outcomes = [Refused("req-1", Reason.QUEUE_FULL, None, "", None)]
            if ends == "failed":
                gate.desk.outcomes = [granted(), Refused("req-1", None, Failure.INVALID_OUTPUT, "", None)]
            if ends == "too_large":
                file = b"x" * (MAX_AUDIO_BYTES + 1)
            answer = await send(gate, file, model="emb@1" if ends == "bad" else "ears@1")
            assert [fd for fd in open_files() if fd.startswith(str(gate.folder))] == []
        assert answer.status_code == {"refused": 429, "bad": 400, "too_large": 413}.get(ends, 200)
        assert [one.held_bytes for one in spools] == [0]


def remembering(seen: list[Spool], open_: Callable[[Spool], spool.Spooled]) -> Callable[[Spool], spool.Spooled]:
    def opened(self: Spool) -> spool.Spooled:
        seen.append(self)
        return open_(self)

    return opened


def open_files() -> list[str]:
    found: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:
            continue  # the one that listed them
    return found


class TestBounds:
    async def test_one_as_large_as_it_may_be(self) -> None:
        async with door() as gate:
            assert (await send(gate, b"x" * MAX_AUDIO_BYTES)).status_code == 200
            refused = await send(gate, b"x" * (MAX_AUDIO_BYTES + 1))
        assert refused.status_code == 413
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("request_too_large", "file")
        assert str(MAX_AUDIO_BYTES) in error["message"]
        assert len(gate.sent) == 1

    async def test_one_that_nobody_announced(self) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield part("model", b"ears@1") + part("file", b"", '; filename="a.wav"')[:-2]
            for _ in range(MAX_AUDIO_BYTES // 10_000 + 1):
                yield b"x" * 10_000
            yield b"\r\n--b--\r\n"

        async with door() as gate:
            kind = {"Content-Type": "multipart/form-data; boundary=b"}
            answer = await gate.http.post(PATH, content=pieces(), headers=kind)
        assert answer.status_code == 413
        assert gate.desk.asked == []

    async def test_fields_without_end(self) -> None:
        async with door() as gate:
            long = await send(gate, prompt="x" * (forms.MAX_FIELDS_BYTES + 1))
            many = await send_raw(
                gate, part("timestamp_granularities[]", b"word") * (forms.MAX_PARTS + 1) + b"--b--\r\n"
            )
            head = await send_raw(gate, part("model", b"ears@1", "; x=" + "y" * 10_000) + b"--b--\r\n")
        assert [one.status_code for one in (long, many, head)] == [400, 400, 400]
        assert long.json()["error"]["param"] == "prompt"

    async def test_one_that_does_not_come_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(forms, "READ_TIMEOUT_SECONDS", 0.02)

        async def pieces() -> AsyncIterator[bytes]:
            yield part("model", b"ears@1")
            await asyncio.Event().wait()

        async with door() as gate:
            kind = {"Content-Type": "multipart/form-data; boundary=b"}
            answer = await gate.http.post(PATH, content=pieces(), headers=kind)
        assert answer.status_code == 408


class TestBadForms:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"model": ""}, "model"),
            ({"model": "m" * 201}, "model"),
            ({"response_format": "xml"}, "response_format"),
            ({"stream": "maybe"}, "stream"),
            ({"language": "en; rm"}, "language"),
            ({"temperature": "hot"}, "temperature"),
            ({"timestamp_granularities[]": ["word", "letter"]}, "timestamp_granularities[]"),
            ({"model": ["ears@1", "ears@1"]}, "model"),
            ({"url": "http://169.254.169.254/"}, "url"),
        ],
    )
    async def test_a_field_that_is_wrong_is_named(self, fields: dict[str, Any], param: str) -> None:
        async with door() as gate:
            answer = await send(gate, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert gate.desk.asked == []

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (b"", "ends before"),
            (b"--b\r\n", "ends before"),
            (part("model", b"ears@1"), "ends before"),
            (part("model", b"ears@1") + b"--b--\r\n", "audio file"),
            (part("model", b"ears@1") + part("file", b"", NAMED) + b"--b--\r\n", "not empty"),
            (part("model", b"ears@1") + part("file", b"x", NAMED) + part("file", b"x", NAMED) + b"--b--\r\n", "twice"),
            # What curl makes of -F file=notafile.
            (part("model", b"ears@1") + part("file", b"notafile") + b"--b--\r\n", "sent as a file"),
            (part("model", b"\xff") + part("file", b"x") + b"--b--\r\n", "UTF-8"),
            (b"--b\r\nContent-Type: text/plain\r\n\r\nx\r\n--b--\r\n", "a name"),
            (b"--b\r\nno header\r\n\r\nx\r\n--b--\r\n", "well-formed"),
            (b"something else altogether", "well-formed"),
        ],
    )
    async def test_a_form_that_is_none(self, body: bytes, words: str) -> None:
        async with door() as gate:
            answer = await send_raw(gate, body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert gate.desk.asked == []

    @pytest.mark.parametrize(
        ("kind", "status"),
        [
            ("application/json", 415),
            ("multipart/form-data", 400),
            ("multipart/form-data; boundary=" + "b" * 71, 400),
            ("multipart/mixed; boundary=b", 415),
        ],
    )
    async def test_another_content_type(self, kind: str, status: int) -> None:
        async with door() as gate:
            assert (await send_raw(gate, part("model", b"ears@1"), kind)).status_code == status

    @pytest.mark.parametrize(
        ("given", "sent"),
        [
            ("../../etc/passwd", "audio"),
            ("a.MP3", "audio.mp3"),
            ('x".wav\r\nX-Own: 1', "audio"),
            ("no extension", "audio"),
            ("a.tar.\u00e9\u00e9", "audio"),
        ],
    )
    async def test_a_name_of_a_file_is_ours(self, given: str, sent: str) -> None:
        async with door() as gate:
            await send(gate, name=given)
        (request,) = gate.sent
        head = taken_apart(request)["file"][0]
        assert f'filename="{sent}"'.encode() in head
        assert b"X-Own" not in request.content

    async def test_what_the_capability_does_not_do(self) -> None:
        async with door() as gate:
            other = await send(gate, model="chat@1")
            absent = await send(gate, model="absent@1")
            text = await gate.http.post("/v1/embeddings", json={"model": "ears@1", "input": "x"})
        assert (other.status_code, other.json()["error"]["code"]) == (400, "operation_not_supported")
        assert (absent.status_code, absent.json()["error"]["code"]) == (404, "model_not_found")
        assert (text.status_code, text.json()["error"]["code"]) == (400, "operation_not_supported")

    async def test_a_server_that_hears_nothing(self) -> None:
        async with door(services={"emb@1": SERVICES["emb@1"]}) as gate:
            answer = await send(gate)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "operation_not_supported")


class TestComplaints:
    async def test_the_runtime_refuses_the_audio(self) -> None:
        async def refuse(_: httpx.Request) -> httpx.Response:
            return answer_of(400, {"error": {"message": "no audio in this file"}})

        async with door(refuse) as gate:
            answer = await send(gate)
        assert (answer.status_code, json.loads(answer.content)["error"]["message"]) == (400, "no audio in this file")
