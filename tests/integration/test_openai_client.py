"""The door as OpenAI's own Python client sees it."""

from __future__ import annotations

import base64
import select
import struct
import wave
import zlib
from collections.abc import Generator
from contextlib import closing
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path

import openai
import pytest
from openai import DefaultHttpxClient, OpenAI
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam

from tests.integration.serving import (
    OTHER_TOKEN,
    PATIENCE_SECONDS,
    TOKEN,
    Serving,
    chat,
    client,
    configuration,
    copy_ledger,
    deployment,
    embedding,
    serving,
)

LIMIT_BYTES = 256 * 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, measured: Path) -> Generator[Serving]:
    folder = tmp_path_factory.mktemp("openai")
    copy_ledger(measured, folder)
    clients = [client("app", TOKEN), client("batch", OTHER_TOKEN, capabilities=["chat@1"])]
    config = configuration([embedding(), chat()], max_body_bytes=LIMIT_BYTES, clients=clients)
    with serving(folder, config) as running:
        yield running


@pytest.fixture
def api(server: Serving) -> Generator[OpenAI]:
    with connected(server, TOKEN) as client_:
        yield client_


def connected(server: Serving, token: str) -> OpenAI:
    http = DefaultHttpxClient(trust_env=False)
    return OpenAI(
        base_url=f"{server.base_url}/v1", api_key=token, max_retries=0, timeout=PATIENCE_SECONDS, http_client=http
    )


class TestModels:
    def test_capabilities_are_models(self, api: OpenAI) -> None:
        assert [model.id for model in api.models.list()] == ["chat@1", "emb@1"]
        assert api.models.retrieve("emb@1").owned_by == "gpuledger"

    def test_a_client_sees_only_what_it_may_ask_for(self, server: Serving) -> None:
        with connected(server, OTHER_TOKEN) as api:
            assert [model.id for model in api.models.list()] == ["chat@1"]
            with pytest.raises(openai.PermissionDeniedError) as refused:
                api.models.retrieve("emb@1")
            assert refused.value.code == "capability_not_allowed"


def test_the_client_lets_go_of_a_connection_before_the_server_does(server: Serving) -> None:
    """Else who comes back just then, as when told to do so after five seconds, would find it closed."""
    patience = openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert patience is not None
    host, port = server.base_url.removeprefix("http://").split(":")
    with closing(HTTPConnection(host, int(port), timeout=PATIENCE_SECONDS)) as connection:
        connection.request("GET", "/readyz")
        assert connection.getresponse().read()
        closed, _, _ = select.select([connection.sock], [], [], patience + 1)
        assert not closed


class TestEmbeddings:
    def test_one_text(self, api: OpenAI) -> None:
        answer = api.embeddings.create(model="emb@1", input="a ledger", encoding_format="float")
        assert answer.model == "emb@1"
        assert len(answer.data[0].embedding) == 384
        assert answer.usage.prompt_tokens == 2

    def test_a_batch_keeps_its_order(self, api: OpenAI) -> None:
        texts = ["one", "two", "three"]
        batch = api.embeddings.create(model="emb@1", input=texts, encoding_format="float")
        alone = [
            api.embeddings.create(model="emb@1", input=text, encoding_format="float").data[0].embedding
            for text in texts
        ]
        assert [one.index for one in batch.data] == [0, 1, 2]
        assert [one.embedding for one in batch.data] == alone

    def test_base64_says_the_same(self, api: OpenAI) -> None:
        packed = api.embeddings.create(model="emb@1", input="a ledger")  # the client's default where it has numpy
        plain = api.embeddings.create(model="emb@1", input="a ledger", encoding_format="float")
        assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)


class TestChat:
    def test_whole(self, api: OpenAI) -> None:
        answer = api.chat.completions.create(
            model="chat@1", messages=[{"role": "user", "content": "hello"}], max_tokens=4
        )
        assert answer.model == "chat@1"
        assert len((answer.choices[0].message.content or "").split()) == 4
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4

    def test_streamed_is_the_same_text(self, api: OpenAI) -> None:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
        whole = api.chat.completions.create(model="chat@1", messages=messages, max_tokens=4)
        stream = api.chat.completions.create(
            model="chat@1", messages=messages, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert {chunk.model for chunk in chunks} == {"chat@1"}
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 4

    def test_text_completions(self, api: OpenAI) -> None:
        answer = api.completions.create(model="chat@1", prompt="hello", max_tokens=3)
        assert len(answer.choices[0].text.split()) == 3
        parts = [part.choices[0].text for part in api.completions.create(model="chat@1", prompt="hello", stream=True)]
        assert len(parts) > 3


@pytest.fixture(scope="module")
def senses(tmp_path_factory: pytest.TempPathFactory) -> Generator[Serving]:
    """What sees, what hears, and what ranks."""
    models = [
        deployment("eyes", "eyes@1", "chat", runtime={"max_images": 2}),
        deployment("ears", "ears@1", "transcription", runtime={"max_audio_bytes": "3MiB"}),
        deployment("order", "order@1", "rerank", runtime={"max_inputs": 3}),
    ]
    with serving(tmp_path_factory.mktemp("senses"), configuration(models)) as running:
        yield running


def recording(seconds: int = 1) -> bytes:
    """Silence, as people record it: 16 kHz, 16 bits."""
    file = BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(bytes(seconds * 32_000))
    return file.getvalue()


def picture() -> str:
    """A grey point."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0\x7f")) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def looking_at(*urls: str) -> list[ChatCompletionMessageParam]:
    images: list[ChatCompletionContentPartParam] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, *images]}]


class TestSpeech:
    @pytest.mark.parametrize("seconds", [1, 60])
    def test_a_recording_becomes_text(self, senses: Serving, seconds: int) -> None:
        """The longer one waits in a file without a name."""
        sound = recording(seconds)
        with connected(senses, TOKEN) as api:
            answer = api.audio.transcriptions.create(model="ears@1", file=("question.wav", sound), language="en")
        assert answer.text.startswith(f"{len(sound)} bytes: ")
        assert sorted(path.name for path in (senses.folder / "state").glob(".upload*")) == []

    def test_as_plain_text(self, senses: Serving) -> None:
        with connected(senses, TOKEN) as api:
            files = ("question.wav", recording())
            spoken = api.audio.transcriptions.create(model="ears@1", file=files, response_format="text")
            same = api.audio.transcriptions.create(model="ears@1", file=files)
        assert spoken.strip() == same.text

    def test_one_that_is_too_long(self, senses: Serving) -> None:
        with connected(senses, TOKEN) as api, pytest.raises(openai.APIStatusError) as refused:
            api.audio.transcriptions.create(model="ears@1", file=("long.wav", recording(120)))
        assert (refused.value.status_code, refused.value.param) == (413, "file")

    def test_what_the_runtime_does_not_know(self, senses: Serving) -> None:
        with connected(senses, TOKEN) as api, pytest.raises(openai.BadRequestError) as refused:
            api.audio.transcriptions.create(model="ears@1", file=("a.wav", recording()), response_format="srt")
        assert "json and text" in str(refused.value)


class TestVision:
    def test_it_sees_as_many_images_as_it_was_shown(self, senses: Serving) -> None:
        with connected(senses, TOKEN) as api:
            answer = api.chat.completions.create(model="eyes@1", messages=looking_at(picture(), picture()))
        assert "[2 images]" in (answer.choices[0].message.content or "")

    def test_too_many(self, senses: Serving) -> None:
        with connected(senses, TOKEN) as api, pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(model="eyes@1", messages=looking_at(*[picture()] * 3))
        assert "takes 2 at once" in str(refused.value)

    def test_an_address_is_not_followed(self, senses: Serving) -> None:
        with connected(senses, TOKEN) as api, pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(model="eyes@1", messages=looking_at(f"{senses.base_url}/healthz"))
        assert (refused.value.code, refused.value.param) == ("invalid_image", "messages")

    def test_a_model_that_does_not_see(self, api: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(model="chat@1", messages=looking_at(picture()))
        assert "takes none" in str(refused.value)


class TestRanking:
    def test_the_best_come_first(self, senses: Serving) -> None:
        document = {"model": "order@1", "query": "cats", "documents": ["a cat", "rates", "dogs"], "top_n": 2}
        with senses.http() as http:
            answer = http.post("/v1/rerank", json=document)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "order@1"
        first, second = answer.json()["results"]
        assert first["relevance_score"] > second["relevance_score"]
        assert {first["index"], second["index"]} < {0, 1, 2}

    def test_too_many(self, senses: Serving) -> None:
        with senses.http() as http:
            answer = http.post("/v1/rerank", json={"model": "order@1", "query": "q", "documents": ["d"] * 4})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")


class TestErrors:
    def test_a_wrong_token(self, server: Serving) -> None:
        with connected(server, "wrong") as api, pytest.raises(openai.AuthenticationError) as refused:
            api.models.list()
        assert refused.value.code == "invalid_api_key"

    def test_a_model_that_is_not_there(self, api: OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as refused:
            api.embeddings.create(model="absent@1", input="x")
        assert refused.value.code == "model_not_found"
        assert refused.value.param == "model"

    def test_an_over_long_body(self, api: OpenAI) -> None:
        with pytest.raises(openai.APIStatusError) as refused:
            api.embeddings.create(model="emb@1", input="x" * (8 * LIMIT_BYTES))
        assert refused.value.status_code == 413
        assert refused.value.code == "request_too_large"

    def test_what_the_runtime_refuses(self, api: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            api.embeddings.create(model="emb@1", input="word " * 600)
        assert "context" in str(refused.value)

    def test_the_wrong_kind_of_work(self, api: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            api.embeddings.create(model="chat@1", input="x")
        assert refused.value.code == "operation_not_supported"
