"""Images in chat messages, and documents to rank: what is let in, and how what is not is named."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import httpx
import pytest

from gpuledger.adapters.http import images
from gpuledger.adapters.http.images import MAX_IMAGE_PIXELS, MAX_JPEG_SEGMENTS, Picture, picture_of
from tests.unit.gateways import MAX_IMAGES, MAX_INPUTS, Door, answer_of, door

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
RERANK = "/v1/rerank"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def png(width: int = 2, height: int = 3) -> bytes:
    """A whole one, grey."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\x7f" * width) * min(height, 100)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def jpeg(width: int = 2, height: int = 3, segments: int = 1) -> bytes:
    """Up to its frame's header, which is all that is looked at."""
    exif = b"\xff\xe1\x00\x08Exif\0\0"
    return (
        b"\xff\xd8"
        + exif * segments
        + b"\xff\xff\xc2\x00\x0b\x08"
        + struct.pack(">HH", height, width)
        + b"\x01\x11\x00"
    )


def gif(width: int = 2, height: int = 3) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\x00\x00"


def webp(form: bytes, width: int = 2, height: int = 3) -> bytes:
    sizes = {
        b"VP8 ": b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height),
        b"VP8L": b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + bytes(5),
        b"VP8X": bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little"),
    }
    return b"RIFF" + struct.pack("<I", 30) + b"WEBP" + form + struct.pack("<I", 10) + sizes[form]


IMAGES = {
    "png": png(),
    "jpeg": jpeg(),
    "gif": gif(),
    "webp, lossy": webp(b"VP8 "),
    "webp, lossless": webp(b"VP8L"),
    "webp, extended": webp(b"VP8X"),
}


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def asking(*parts: Any, model: str = "eyes@1") -> dict[str, Any]:
    content: list[Any] = [{"type": "text", "text": "what is this?"}, *parts]
    return {
        "model": model,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}],
    }


async def ask(gate: Door, document: object) -> httpx.Response:
    return await gate.http.post(CHAT, json=document)


def message_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


class TestImages:
    @pytest.mark.parametrize("name", IMAGES)
    async def test_those_that_a_message_carries_go_to_the_runtime_as_they_are(self, name: str) -> None:
        document = asking(image(url_of(IMAGES[name], "image/" + name.partition(",")[0])))
        async with door() as gate:
            answer = await ask(gate, document)
        assert answer.status_code == 200, answer.text
        assert json.loads(gate.sent[0].content) == document

    @pytest.mark.parametrize("name", IMAGES)
    def test_their_sizes_are_read(self, name: str) -> None:
        assert picture_of(IMAGES[name]) == Picture(name.partition(",")[0], 2, 3)

    @pytest.mark.parametrize("name", IMAGES)
    def test_what_is_cut_off_is_none_and_no_defect(self, name: str) -> None:
        data = IMAGES[name]
        assert all(picture_of(data[:length]) in (None, picture_of(data)) for length in range(len(data)))
        assert picture_of(data[:8]) is None

    @pytest.mark.parametrize(
        "url",
        [
            "https://example.org/cat.png",
            "http://169.254.169.254/latest/meta-data",
            "file:///etc/passwd",
            "data:image/png,raw",
            "data:image/svg+xml;base64,PHN2Zz4=",
            "data:text/html;base64,PGh0bWw+",
            "DATA:image/png;base64,",
            "",
        ],
    )
    async def test_an_address_is_followed_by_nobody(self, url: str) -> None:
        async with door() as gate:
            answer = await ask(gate, asking(image(url)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_image")
        assert message_of(answer).startswith("messages[1].content[1].image_url.url must be data:image/png;base64,")
        assert (gate.sent, gate.desk.asked) == ([], [])

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("data:image/png;base64,@@@@", "not valid base64"),
            ("data:image/png;base64,abc", "not valid base64"),
            (url_of(png()) + "\n", "not valid base64"),
            (url_of(b"<svg/>"), "is not a PNG, JPEG, WebP or GIF"),
            (url_of(b""), "is not a PNG"),
            (url_of(jpeg()), "says image/png and is image/jpeg"),
            (url_of(png(50_000, 50_000)), "has 50000 x 50000 pixels"),
            (url_of(png(0, 5)), "has 0 x 5 pixels"),
            (url_of(jpeg(60_000, 60_000), "image/jpeg"), "has 60000 x 60000 pixels"),
        ],
    )
    async def test_one_that_is_not_what_it_says(self, url: str, words: str) -> None:
        async with door() as gate:
            answer = await ask(gate, asking(image(url)))
        assert answer.status_code == 400
        assert message_of(answer).startswith("messages[1].content[1].image_url.url ")
        assert words in message_of(answer)

    async def test_one_as_large_as_it_may_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = png()
        async with door() as gate:
            monkeypatch.setattr(images, "MAX_IMAGE_BYTES", len(data))
            assert (await ask(gate, asking(image(url_of(data))))).status_code == 200
            for limit in (len(data) - 1, 10):
                monkeypatch.setattr(images, "MAX_IMAGE_BYTES", limit)
                refused = await ask(gate, asking(image(url_of(data))))
                assert message_of(refused).endswith(f"is larger than {limit} bytes")

    def test_pixels_are_counted_together(self) -> None:
        assert MAX_IMAGE_PIXELS == 8192 * 4096

    def test_a_jpeg_of_nothing_but_beginnings_is_not_read_to_its_end(self) -> None:
        assert picture_of(jpeg(segments=MAX_JPEG_SEGMENTS - 2)) == Picture("jpeg", 2, 3)
        assert picture_of(jpeg(segments=MAX_JPEG_SEGMENTS)) is None
        assert picture_of(b"\xff\xd8" + b"\xff" * 10_000_000) is None

    async def test_as_many_as_the_envelope_was_measured_with(self) -> None:
        one = image(url_of(png()))
        async with door() as gate:
            enough = await ask(gate, asking(*[one] * MAX_IMAGES))
            more = asking(*[one] * MAX_IMAGES)
            more["messages"].append({"role": "user", "content": [one]})
            refused = await ask(gate, more)
            blind = await ask(gate, asking(one, model="chat@1"))
        assert enough.status_code == 200
        assert message_of(refused) == "messages have 3 images, and eyes@1 takes 2 at once"
        assert message_of(blind) == "messages[1].content[1] is an image, and chat@1 takes none"

    @pytest.mark.parametrize(
        "part",
        [
            "text",
            {"text": "no type"},
            {"type": "video_url", "video_url": {"url": "http://169.254.169.254/"}},
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            {"type": "file", "file": {"file_data": ""}},
            {"image_url": {"url": "http://169.254.169.254/"}},
            {"type": ["image_url"], "image_url": {"url": "http://169.254.169.254/"}},
            {"type": "text", "text": {"url": "http://169.254.169.254/"}},
            {"type": "image_url", "image_url": "http://169.254.169.254/"},
            {"type": "image_url", "image_url": {"url": None}},
            {"type": "image_url"},
        ],
    )
    async def test_parts_that_are_not_known_do_not_pass(self, part: Any) -> None:
        """A runtime may know more of them than we do, and follow an address in one."""
        async with door() as gate:
            answer = await ask(gate, asking(part))
        assert answer.status_code == 400
        assert message_of(answer).startswith("messages[1].content[1]")
        assert gate.sent == []

    @pytest.mark.parametrize(
        "content", [None, "text", [], [{"type": "text", "text": ""}], [{"type": "refusal", "refusal": "no"}]]
    )
    async def test_contents_without_images_pass_to_whoever_chats(self, content: Any) -> None:
        async with door() as gate:
            document = {"model": "chat@1", "messages": [{"role": "assistant", "content": content}]}
            assert (await ask(gate, document)).status_code == 200
            assert json.loads(gate.sent[0].content) == document

    async def test_a_content_of_no_shape(self) -> None:
        async with door() as gate:
            answer = await ask(gate, {"model": "eyes@1", "messages": [{"role": "user", "content": {"type": "text"}}]})
        assert message_of(answer) == "messages[0].content must be a text or a list of parts"

    async def test_the_body_has_its_bound_as_well(self) -> None:
        async with door() as gate:
            answer = await ask(gate, asking(image(url_of(png() + bytes(100_000)))))
        assert answer.status_code == 413

    async def test_embeddings_are_of_no_messages(self) -> None:
        """Some runtimes embed chat messages instead of the input, and follow the addresses in them."""
        messages = asking(image("http://169.254.169.254/"))["messages"]
        async with door() as gate:
            answer = await gate.http.post("/v1/embeddings", json={"model": "emb@1", "input": "x", "messages": messages})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


class TestRerank:
    async def test_documents_go_to_the_runtime_and_the_answer_is_named_by_its_capability(self) -> None:
        results = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]

        async def runtime(_: httpx.Request) -> httpx.Response:
            return answer_of(200, {"model": "file.gguf", "results": results, "usage": {"prompt_tokens": 9}})

        document = {"model": "order@1", "query": "q", "documents": ["a", "b"], "top_n": 2, "return_documents": False}
        async with door(runtime) as gate:
            answer = await gate.http.post(RERANK, json=document)
        assert (answer.json()["model"], answer.json()["results"]) == ("order@1", results)
        (sent,) = gate.sent
        assert (sent.url.path, json.loads(sent.content)) == (RERANK, document)
        assert gate.desk.asked[0].operation == "rerank"
        assert gate.desk.ended[0].prompt_tokens == 9

    async def test_as_many_as_the_envelope_was_measured_with(self) -> None:
        async with door() as gate:
            document = {"model": "order@1", "query": "q", "documents": ["a"] * (MAX_INPUTS + 1)}
            answer = await gate.http.post(RERANK, json=document)
        assert message_of(answer) == "documents has 5 entries, and order@1 takes 4 at once"

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"query": ""}, "query"),
            ({"query": ["q"]}, "query"),
            ({"documents": []}, "documents"),
            ({"documents": "a"}, "documents"),
            ({"documents": ["a", ""]}, "documents"),
            ({"documents": [{"text": "a"}]}, "documents"),
            ({"documents": [7, 8]}, "documents"),
            ({"top_n": 0}, "top_n"),
            ({"top_n": True}, "top_n"),
            ({"top_n": 1.5}, "top_n"),
            ({"return_documents": "yes"}, "return_documents"),
        ],
    )
    async def test_one_of_no_shape(self, change: dict[str, Any], param: str) -> None:
        document: dict[str, Any] = {"model": "order@1", "query": "q", "documents": ["a", "b"], **change}
        async with door() as gate:
            answer = await gate.http.post(RERANK, json=document)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    async def test_it_is_not_streamed(self) -> None:
        document = {"model": "order@1", "query": "q", "documents": ["a"], "stream": True}
        async with door() as gate:
            assert (await gate.http.post(RERANK, json=document)).status_code == 200
