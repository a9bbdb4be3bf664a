"""Images in chat messages: only those that the message itself carries, of known formats, held to bounds.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo..."}}

An address is never followed, by us or by a runtime: it would let a client reach whatever this machine reaches. What a
file says of itself is checked before a decoder of a runtime sees it: a few kilobytes can unpack to gigabytes.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Final

from gpuledger.domain.documents import Json

from .openai_errors import ApiError, bad_request

#: As OpenAI has it. `max_body_bytes` of the configuration is usually less, and holds as well.
MAX_IMAGE_BYTES: Final = 20 * 1024 * 1024
#: Of one image, decoded: 96 MiB at three bytes each. Models scale an image down to about one megapixel.
MAX_IMAGE_PIXELS: Final = 32 * 1024 * 1024
#: Segments of a JPEG before its size: 16 MiB of colour profiles at 64 KiB each are 256.
MAX_JPEG_SEGMENTS: Final = 1000

_DATA_URL: Final = re.compile(r"data:(image/[a-z]+);base64,")
_PARTS: Final = ("text", "refusal", "image_url")


def check_contents(messages: list[Json], max_images: int, model: str) -> None:
    """Every part of every message, and no more images in all than the envelope was measured with. Raises ApiError."""
    images = 0
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if content is None or isinstance(content, str):
            continue
        where = f"messages[{index}].content"
        if not isinstance(content, list):
            raise bad_request(f"{where} must be a text or a list of parts", "messages")
        for number, part in enumerate(content):
            images += _check_part(part, f"{where}[{number}]", max_images, model)
    if images > max_images:
        raise bad_request(f"messages have {images} images, and {model} takes {max_images} at once", "messages")


def _check_part(part: Json, where: str, max_images: int, model: str) -> int:
    """How many images it is. What is not known here might be an address that a runtime would follow."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in _PARTS:
        raise bad_request(f"{where} must have a type that is {', '.join(_PARTS[:-1])} or {_PARTS[-1]}", "messages")
    if kind != "image_url":
        if not isinstance(part.get(str(kind)), str):
            raise bad_request(f"{where}.{kind} must be a text", "messages")
        return 0
    if max_images == 0:
        raise bad_request(f"{where} is an image, and {model} takes none", "messages")
    told = part.get("image_url")
    url = told.get("url") if isinstance(told, dict) else None
    if not isinstance(url, str):
        raise bad_request(f"{where}.image_url.url must be a data: URL", "messages")
    _check_image(url, f"{where}.image_url.url")
    return 1


def _check_image(url: str, where: str) -> None:
    match = _DATA_URL.match(url)
    if match is None:
        shape = "data:image/png;base64,... (or jpeg, webp, gif)"
        raise bad_request(f"{where} must be {shape}: an address is not followed", "messages", "invalid_image")
    # Four characters for three bytes: judged before it is decoded.
    if (len(url) - match.end()) // 4 * 3 > MAX_IMAGE_BYTES + 2:
        raise _invalid(where, f"is larger than {MAX_IMAGE_BYTES} bytes")
    try:
        data = base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise _invalid(where, "is not valid base64") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise _invalid(where, f"is larger than {MAX_IMAGE_BYTES} bytes")
    found = picture_of(data)
    if found is None:
        raise _invalid(where, "is not a PNG, JPEG, WebP or GIF image")
    if match[1].removeprefix("image/").replace("jpg", "jpeg") != found.kind:
        raise _invalid(where, f"says {match[1]} and is image/{found.kind}")
    if not 0 < found.width * found.height <= MAX_IMAGE_PIXELS:
        size = f"{found.width} x {found.height}"
        raise _invalid(where, f"has {size} pixels, and {MAX_IMAGE_PIXELS} in all are the most")


def _invalid(where: str, what: str) -> ApiError:
    return bad_request(f"{where} {what}", "messages", "invalid_image")


# ---- what a file says of itself -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Picture:
    """Format and size in pixels."""

    kind: str
    width: int
    height: int


def picture_of(data: bytes) -> Picture | None:
    """From its first bytes; None when it is no image of a known format, or is cut off before it says its size."""
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR" and len(data) >= 24:
        return Picture("png", int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"))
    if data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 10:
        return Picture("gif", int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little"))
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    return None


def _webp(data: bytes) -> Picture | None:
    """RFC 9649, 2.5 to 2.7: lossy, lossless, extended."""
    if len(data) < 30:
        return None
    match data[12:16]:
        case b"VP8 ":
            width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        case _:
            return None
    return Picture("webp", width, height)


def _jpeg(data: bytes) -> Picture | None:
    """From marker to marker up to the frame's header (ITU T.81, B.2.2), which has the size."""
    at = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if at + 9 > len(data) or data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = (int.from_bytes(data[start : start + 2], "big") for start in (at + 5, at + 7))
            return Picture("jpeg", width, height)
        elif marker == 0x01 or 0xD0 <= marker <= 0xD7:  # without a length
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None
