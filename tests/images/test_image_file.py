"""Image files: formats, orientation and limits, before and after decoding."""

import io
import struct
import zlib
from typing import Any

import pytest
from PIL import Image

from images.image_file import MAX_PIXELS, decode, read_header
from images.image_header import ImageHeader
from tests.images.image_files import file_of, image_of
from wire.errors import InvalidRequest

_TURN = Image.Transpose
TURNS = (
    _TURN.FLIP_LEFT_RIGHT, _TURN.ROTATE_180, _TURN.FLIP_TOP_BOTTOM, _TURN.TRANSPOSE, _TURN.ROTATE_270, _TURN.TRANSVERSE,
    _TURN.ROTATE_90,
)  # fmt: skip
"""What an image stored with the EXIF orientations 2, 3, ... needs, as that standard defines them."""
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header claims a size and which has almost no data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.covers("B.images.4")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_allowed_formats_are_read(kind: str) -> None:
    data = file_of(image_of(12, 7), kind)

    assert read_header(data) == ImageHeader(kind, 12, 7)
    assert (decode(data).size, decode(data).mode) == ((12, 7), "RGB")


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "LA", "1", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    assert decode(file_of(Image.new(mode, (3, 2)))).mode == "RGB"


@pytest.mark.covers("B.images.4")
def test_of_an_animation_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])

    assert decode(data).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.covers("B.images.4")
@pytest.mark.parametrize(("orientation", "turned"), list(enumerate((None, *TURNS), 1)))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_orientation_is_applied_to_size_and_pixels(kind: str, orientation: int, turned: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(image_of(6, 4), kind, exif=exif)
    stored = Image.open(io.BytesIO(data)).convert("RGB")

    header, decoded = read_header(data), decode(data)

    assert (header.width, header.height) == decoded.size == ((4, 6) if orientation >= 5 else (6, 4))
    assert decoded.tobytes() == (stored if turned is None else stored.transpose(turned)).tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
def test_a_header_is_read_without_the_pixels(kind: str) -> None:
    data = file_of(image_of(64, 48), kind)

    assert read_header(data[: len(data) * 2 // 3]) == ImageHeader(kind, 64, 48)


@pytest.mark.parametrize("data", [b"", b"GIF89a", SVG, b"%PDF-1.4", file_of(image_of(4, 4), "BMP"), bytes(99)])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"not an image in a supported format \(PNG, JPEG, WEBP, GIF\)"):
        read_header(data)


@pytest.mark.parametrize("size", [(MAX_PIXELS + 1, 1), (100_000, 100_000)])
def test_too_many_pixels_are_refused_by_the_header(size: tuple[int, int]) -> None:
    data = png_of_size(*size)

    for read in (read_header, decode):
        with pytest.raises(InvalidRequest, match=f"the limit is {MAX_PIXELS} pixels"):
            read(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_file_is_refused(kind: str) -> None:
    data = file_of(image_of(64, 64), kind)

    with pytest.raises(InvalidRequest):
        decode(data[: len(data) // 2])


def test_decoding_equals_pillow() -> None:
    data = file_of(image_of(9, 5), "JPEG")

    assert decode(data).tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()
