"""Image files for tests: random pixels, one format each."""

import io
import random
import zlib
from typing import Any

from PIL import Image


def image_of(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return random pixels, smooth enough to survive a lossy format."""
    draw = random.Random(seed)
    small = Image.frombytes("RGB", (4, 4), bytes(draw.randrange(256) for _ in range(48)))
    return small.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the image as a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def chunk_of(kind: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG."""
    body = kind + content
    return len(content).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


def with_chunks(png: bytes, chunks: bytes) -> bytes:
    """Return a PNG with these chunks after its header."""
    return png[:33] + chunks + png[33:]


def with_size(png: bytes, width: int, height: int) -> bytes:
    """Return a PNG whose header claims this size, with the data of `png`, in RGB."""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return png[:8] + chunk_of(b"IHDR", size + b"\x08\x02\0\0\0") + png[33:]
