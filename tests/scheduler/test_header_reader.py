"""The process that reads image headers: all formats, its limits, and what replaces it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from images.image_header import ImageHeader
from scheduler.images.header_reader import HeaderReader
from tests.images.image_files import chunk_of, file_of, image_of, with_chunks
from wire.errors import InvalidRequest

pytestmark = pytest.mark.anyio

PNG = file_of(image_of(20, 10))


@pytest.fixture
async def reader() -> AsyncIterator[HeaderReader]:
    """A reader that is closed at the end."""
    made = HeaderReader(cpu_s=0.2)
    yield made
    await made.close()


async def test_every_format_is_read_after_the_process_gave_up_files(reader: HeaderReader) -> None:
    sideways = image_of(20, 10).getexif()
    sideways[0x0112] = 6
    files = [(kind, file_of(image_of(20, 10), kind)) for kind in ("PNG", "JPEG", "WEBP", "GIF")]

    assert [await reader.read(data) for _, data in files] == [ImageHeader(kind, 20, 10) for kind, _ in files]
    assert await reader.read(file_of(image_of(20, 10), "JPEG", exif=sideways)) == ImageHeader("JPEG", 10, 20)


@pytest.mark.long
async def test_the_largest_webp_fits_into_its_memory(reader: HeaderReader) -> None:
    lossless = file_of(image_of(4, 4).resize((8192, 8192)), "WEBP", quality=1, method=0)

    assert await reader.read(lossless) == ImageHeader("WEBP", 8192, 8192)


async def test_a_header_of_too_much_work_fails_alone(reader: HeaderReader) -> None:
    endless = with_chunks(PNG, chunk_of(b"abCd", b"") * 2**20)
    before, refused, after = await asyncio.gather(
        *map(reader.read, (PNG, endless, PNG)), return_exceptions=True
    )  # fmt: skip

    assert before == after == ImageHeader("PNG", 20, 10)
    assert isinstance(refused, InvalidRequest)
    assert str(refused) == "its header takes more than 0.2 s of CPU time, or too much memory"


async def test_a_killed_process_is_replaced_within_one_read(reader: HeaderReader) -> None:
    await reader.read(PNG)
    first = reader.pid
    assert first is not None
    os.kill(first, 9)

    assert await reader.read(PNG) == ImageHeader("PNG", 20, 10)
    assert reader.pid not in (None, first)


async def test_the_process_gets_no_secret_of_ours(reader: HeaderReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "secret")
    await reader.read(PNG)

    assert "PDSERVE_API_KEY" not in psutil.Process(reader.pid).environ()


def test_the_scheduler_itself_loads_no_reader_of_image_files() -> None:
    code = "import sys, scheduler.serving, scheduler.images.header_reader; sys.exit('PIL' in sys.modules)"

    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=300).returncode == 0
