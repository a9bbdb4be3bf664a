"""A tiny picture and a tiny recording, for the requests that check or drive a runtime. Made here: no file is needed."""

from __future__ import annotations

import base64
import io
import math
import struct
import wave
import zlib
from typing import Final

_RATE_HZ: Final = 16_000
_TONE_HZ: Final = 440
#: A fiftieth of full scale: heard by a model, and not clipped by anything on the way.
_AMPLITUDE: Final = 655
_PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
#: Header of a PNG: 8 bits a channel, colour, and the only methods of compression, filtering and interlacing there are.
_RGB: Final = (8, 2, 0, 0, 0)


def tone(duration_ms: int = 200) -> bytes:
    """A quiet tone as a WAV file: 16 kHz, one channel, 16 bits, which is what speech models compute with."""
    count = _RATE_HZ * duration_ms // 1000
    samples = (round(_AMPLITUDE * math.sin(math.tau * _TONE_HZ * index / _RATE_HZ)) for index in range(count))
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(_RATE_HZ)
        writer.writeframes(struct.pack(f"<{count}h", *samples))
    return file.getvalue()


def picture(side_pixels: int = 64) -> bytes:
    """A square PNG of a colour that changes from corner to corner. Models cut images into patches of up to 32 pixels.

    >>> picture()[:8] == _PNG_SIGNATURE, picture(16) != picture(17)
    (True, True)
    """
    shades = [255 * place // max(1, side_pixels - 1) for place in range(side_pixels)]
    # Each row begins with its filter: none.
    rows = b"".join(b"\0" + bytes(value for x in shades for value in (x, y, 255 - x)) for y in shades)
    header = struct.pack(">II5B", side_pixels, side_pixels, *_RGB)
    return _PNG_SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def data_url(png: bytes) -> str:
    """As a chat message takes an image: without a fetch."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
