"""An audio file with what is wanted of it, as multipart/form-data (RFC 7578): taken apart while it comes in.

Nothing of it is believed: fields are those that are known here, names of files and types are made anew, and each bound
holds while the body is read, since nobody has to announce how long it is.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import Final

from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from .bodies import Bounds, check_content_type, check_model, read_chunks
from .openai_errors import ApiError, bad_request
from .payloads import FormPayload
from .spool import Spool, Spooled

FORM: Final = "multipart/form-data"
#: All fields but the file, together: a prompt is a few hundred words.
MAX_FIELDS_BYTES: Final = 64 * 1024
#: Fields that may come once each, and granularities, of which there are two.
MAX_PARTS: Final = 16
#: Boundaries, and the heads of so many parts: what a body may have beside its fields and its file.
MAX_FRAMING_BYTES: Final = 128 * 1024
#: 25 MB in five minutes are 0.7 Mbit/s.
READ_TIMEOUT_SECONDS: Final = 300.0

FILE: Final = "file"
MODEL: Final = "model"
GRANULARITIES: Final = "timestamp_granularities[]"
_FIELDS: Final = (FILE, MODEL, "language", "prompt", "response_format", "temperature", GRANULARITIES, "stream")
_FORMATS: Final = ("json", "text", "srt", "verbose_json", "vtt")

_LANGUAGE: Final = re.compile(r"[A-Za-z]{2,16}(-[A-Za-z0-9]{1,8})?")
_NUMBER: Final = re.compile(r"[0-9]{1,3}(\.[0-9]{1,9})?")
_EXTENSION: Final = re.compile(r"\.([A-Za-z0-9]{1,5})\Z")
_MEDIA_TYPE: Final = re.compile(r"(audio|video)/[a-z0-9.+-]{1,40}")


@dataclass(slots=True)
class Form:
    """What a client asked for. `file` is kept until it is closed."""

    file: Spooled
    fields: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    file_name: str = "audio"
    file_type: str = "application/octet-stream"
    file_sha256: str = ""

    def value(self, name: str) -> str | None:
        """Of a field that may come once."""
        return next((text for one, text in self.fields if one == name), None)

    @property
    def model(self) -> str:
        return check_model(self.value(MODEL))

    @property
    def wants_stream(self) -> bool:
        return self.value("stream") == "true"

    def payload(self) -> FormPayload:
        """What the runtime gets."""
        return FormPayload(self.fields, self.file, self.file_name, self.file_type)

    def mac(self, key: bytes, operation: str) -> str:
        """Of what was asked, however it was framed; `file_sha256` is there when it was wanted while reading."""
        told = hmac.new(key, operation.encode(), hashlib.sha256)
        for name, text in [*sorted(self.fields), (self.file_name, self.file_sha256)]:
            told.update(f"\n{len(name)} {len(text)} {name}{text}".encode())
        return told.hexdigest()


async def read_form(request: Request, spool: Spool, max_file_bytes: int, *, hashed: bool) -> Form:
    """Read and check one. `hashed`: with the SHA-256 of its file. Raises ApiError; then nothing is kept."""
    check_content_type(request, FORM)
    _, options = parse_options_header(request.headers["content-type"])
    reader = _Reader(options.get(b"boundary", b""), Form(spool.open()), max_file_bytes, hashed)
    try:
        limit_bytes = max_file_bytes + MAX_FIELDS_BYTES + MAX_FRAMING_BYTES
        await read_chunks(request, Bounds(limit_bytes, READ_TIMEOUT_SECONDS, too_large(max_file_bytes)), reader)
        return reader.finished()
    except BaseException:
        reader.drop()
        raise


class _Reader:
    """A sink that takes a body apart. The parser calls back for what it finds in the chunk that it is given."""

    def __init__(self, boundary: bytes, form: Form, max_file_bytes: int, hashed: bool) -> None:
        # The parser takes 256, RFC 2046 (5.1.1) says 70.
        if not 1 <= len(boundary) <= 70:
            raise bad_request("the Content-Type must name a boundary of 1 to 70 characters")
        self._form = form
        self._max_file_bytes = max_file_bytes
        self._digest = hashlib.sha256() if hashed else None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._part_ends,
                "on_end": self._all_is_there,
            },
        )
        self._headers: dict[bytes, bytes] = {}
        self._header = (bytearray(), bytearray())
        self._name = ""
        self._text = bytearray()
        self._file_data = bytearray()
        self._parts = 0
        self._fields_bytes = 0
        self._has_file = False
        self._complete = False

    async def take(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise bad_request(f"the body is not well-formed {FORM}") from None
        if self._file_data:
            data = bytes(self._file_data)
            self._file_data.clear()
            if self._digest is not None:
                self._digest.update(data)
            await self._form.file.write(data)

    def drop(self) -> None:
        self._form.file.close()

    def finished(self) -> Form:
        """Raises ApiError for what is missing."""
        form = self._form
        if not self._complete:
            raise bad_request(f"the body ends before its {FORM} does")
        if not self._has_file or form.file.length_bytes == 0:
            raise bad_request("file must be an audio file, and not empty", FILE)
        _check_fields(form)
        form.file_sha256 = "" if self._digest is None else self._digest.hexdigest()
        return form

    # ---- what the parser finds -------------------------------------------------------------------------------------

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise bad_request(f"the form has more than {MAX_PARTS} fields")
        self._headers = {}
        self._name = ""
        self._text.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def _header_ends(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _headers_end(self) -> None:
        disposition, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if disposition != b"form-data" or not name:
            raise bad_request("each part of the form must have a name")
        if name not in _FIELDS:
            raise bad_request(f"the form takes {', '.join(_FIELDS)}, and not {name[:40]!r}", name[:40])
        known = [one for one, _ in self._form.fields]
        if name != GRANULARITIES and (name in known or (name == FILE and self._has_file)):
            raise bad_request(f"{name} is there twice", name)
        self._name = name
        if name == FILE:
            if b"filename" not in options:
                raise bad_request(
                    "file must be sent as a file, with a name (curl: -F file=@PATH), and not as text", FILE
                )
            self._has_file = True
            self._form.file_name = _file_name(options.get(b"filename", b"").decode("utf-8", "replace"))
            self._form.file_type = _file_type(self._headers.get(b"content-type", b"").decode("latin-1"))

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            if self._form.file.length_bytes + len(self._file_data) + end - start > self._max_file_bytes:
                raise too_large(self._max_file_bytes)
            self._file_data += data[start:end]
            return
        self._fields_bytes += end - start
        if self._fields_bytes > MAX_FIELDS_BYTES:
            raise bad_request(f"the fields beside the file are longer than {MAX_FIELDS_BYTES} bytes", self._name)
        self._text += data[start:end]

    def _part_ends(self) -> None:
        if self._name == FILE:
            return
        try:
            self._form.fields.append((self._name, self._text.decode()))
        except UnicodeDecodeError:
            raise bad_request(f"{self._name} is not UTF-8", self._name) from None

    def _all_is_there(self) -> None:
        self._complete = True


def too_large(limit_bytes: int) -> ApiError:
    """An audio file beyond what its capability takes."""
    return bad_request(f"the file is larger than {limit_bytes} bytes", FILE, "request_too_large", 413)


def _check_fields(form: Form) -> None:
    """Every field that is there."""
    check_model(form.value(MODEL))
    if (given := form.value("response_format")) not in (None, *_FORMATS):
        raise bad_request(f"response_format must be {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}", "response_format")
    if (given := form.value("stream")) not in (None, "true", "false"):
        raise bad_request("stream must be true or false", "stream")
    if (given := form.value("language")) and _LANGUAGE.fullmatch(given) is None:
        raise bad_request("language must be a code, as en", "language")
    if (given := form.value("temperature")) and _NUMBER.fullmatch(given) is None:
        raise bad_request("temperature must be a number, as 0.2", "temperature")
    if any(name == GRANULARITIES and text not in ("word", "segment") for name, text in form.fields):
        raise bad_request(f"{GRANULARITIES} must be word or segment", GRANULARITIES)


def _file_name(given: str) -> str:
    """A name of ours, with the extension by which runtimes tell formats apart."""
    match = _EXTENSION.search(given)
    return "audio" if match is None else f"audio.{match[1].lower()}"


def _file_type(given: str) -> str:
    match = _MEDIA_TYPE.match(given.strip().lower())
    return "application/octet-stream" if match is None else match[0]
