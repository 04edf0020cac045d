"""Images that are refused: a 400 that names the part and the limit, and the next request is served."""

import math
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from images.checkpoint import VisionCheckpoint
from images.families import vision_family
from images.image_file import MAX_PIXELS
from images.token_count import ImageTokens
from scheduler.images import image_limits, image_source
from scheduler.images.image_embeds import read_embeds
from tests.images.image_files import chunk_of, file_of, image_of, with_chunks, with_size
from tests.images.settings import QWEN, QWEN_PROCESSOR
from tests.remote_files.raw_server import Request, answer, in_turn, ok, raw_server
from tests.scheduler.vision_model import (
    HIDDEN_SIZE,
    PARTS,
    PNG,
    chat,
    data_url,
    embeds_part,
    image_part,
    write_vision_model,
)
from wire.errors import InvalidRequest

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer", "one_header_reader")]

PATH = "/v1/chat/completions"
GOOD = image_part(data_url())
HERE = {"allow_private_urls": ("127.0.0.1/32",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the vision model."""
    return write_vision_model(tmp_path_factory.mktemp("vision"))


async def refusal(served: Any, *parts: Any, path: str = "messages.0.content.1", **fields: Any) -> str:
    """Return the message of a 400 for these parts after a text; a good image is served after it."""
    body = {"model": served.model, "max_tokens": 4} | fields
    response = await served.client.post(PATH, json=body | {"messages": chat("what?", *parts)})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == path
    good = await served.client.post(PATH, json=body | {"messages": chat(GOOD)})
    assert good.status_code == 200, good.text
    assert served.context.images.budget.num_bytes == 0
    message: str = error["message"]
    return message


NO_IMAGE = "not an image in a supported format (PNG, JPEG, WEBP, GIF)"
TEXT_BOMB = chunk_of(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**26)))
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
BAD_URLS: list[tuple[str, str]] = [
    (data_url(SVG, "image/svg+xml"), NO_IMAGE),
    (data_url(SVG), NO_IMAGE),
    (data_url(b""), NO_IMAGE),
    (data_url(b"hello"), NO_IMAGE),
    (data_url(PNG[:20]), NO_IMAGE),
    (data_url(file_of(image_of(8, 8), "BMP"), "image/bmp"), NO_IMAGE),
    (data_url(with_chunks(PNG, TEXT_BOMB)), NO_IMAGE),
    (data_url(with_size(PNG, 65_535, 65_535)), f"the limit is {MAX_PIXELS} pixels"),
    (data_url(with_size(PNG, 2**31 - 1, 2**31 - 1)), "pixels"),
    ("data:image/png,abc", "a data URL of an image must begin with data:image/png;base64,"),
    ("data:", "a data URL of an image must begin with data:image/png;base64,"),
    ("data:image/png;base64,!!!!", "not valid base64"),
    ("data:image/png;base64,AAA", "not valid base64"),
    ("data:image/png;base64,AA==AAAA", "not valid base64"),
    ("http://127.0.0.1:1/cat.png", "127.0.0.1 is not a public address"),
    ("http://localhost:1/cat.png", "is not a public address"),
    ("http://169.254.169.254/latest/meta-data", "pdserve never connects to 169.254.169.254"),
    ("http://[::ffff:10.0.0.1]/cat.png", "is not a public address"),
    ("http://2130706433/cat.png", "an IP address must be in its full form"),
    ("http://user:secret@example.com/cat.png", "must not contain a user or password"),
    ("ftp://example.com/cat.png", "begins with http:// or https://"),
    ("cat.png", "begins with http:// or https://"),
    ("file:///etc/hostname", "file: URLs need --allowed-local-media-path"),
]


@pytest.mark.covers("B.images.4", "B.images.5")
@pytest.mark.parametrize(("url", "message"), BAD_URLS)
async def test_a_bad_image_is_400_and_harms_no_later_one(serve: Any, folder: Path, url: str, message: str) -> None:
    async with serve(folder=folder) as served:
        reported = await refusal(served, image_part(url))

        assert reported.startswith("messages.0.content.1: ")
        assert message in reported
        assert "secret" not in reported


BAD_PARTS: list[tuple[Any, str]] = [
    ({"type": "image_url"}, "messages.0.content.1.image_url.url must be a data:, https:, http: or file: URL"),
    ({"type": "image_url", "image_url": {}}, "image_url.url must be a data:"),
    ({"type": "image_url", "image_url": 3}, "image_url must be an object with a url"),
    ({"type": "image_url", "image_url": "https://example.com/a.png"}, "image_url must be an object with a url"),
    (image_part(data_url(), detail="fine"), "image_url.detail is 'fine', but must be one of auto, low, high, original"),
    ({"type": "image_url", "image_url": None, "uuid": "cat"}, "no image with the uuid 'cat' is stored: send its URL"),
    ({"type": "image_url", "image_url": None, "uuid": 3}, "uuid must be a text of at most 256 characters"),
    ({"type": "image_url", "image_url": None, "uuid": "x" * 257}, "uuid must be a text of at most 256 characters"),
    ({"type": "image_embeds"}, "image_embeds must have embeddings, or be null next to a uuid"),
    ({"type": "image_embeds", "image_embeds": "AAAA"}, "image_embeds is a string, such as a pickled tensor; nothing"),
    ({"type": "image_embeds", "image_embeds": [[0.5]]}, 'image_embeds must be {"data": base64'),
    ({"type": "image_embeds", "image_embeds": None, "uuid": "cat"}, "no image with the uuid 'cat' is stored"),
    (embeds_part(path="/tmp/x.pt"), "an unknown field 'path'; known are data, dtype, shape, grid"),
    (embeds_part(data=None), "image_embeds.data must be a text"),
    (embeds_part(data="!!!!"), "image_embeds.data is not valid base64"),
    (embeds_part(data="AA==AAAA"), "image_embeds.data is not valid base64"),
    (embeds_part(b""), "image_embeds.data has 0 bytes, but shape [4, 8] of float32 has 128"),
    (embeds_part(bytes(127)), "image_embeds.data has 127 bytes, but shape [4, 8] of float32 has 128"),
    (embeds_part(dtype="bfloat16"), "image_embeds.data has 128 bytes, but shape [4, 8] of bfloat16 has 64"),
    (embeds_part(dtype="int8"), "image_embeds.dtype is 'int8', but must be one of float32, bfloat16, float16"),
    (embeds_part(dtype=["float32"]), "image_embeds.dtype is ['float32'], but must be one of"),
    (embeds_part(dtype=None), "image_embeds.dtype is missing"),
    (embeds_part(shape=None), "image_embeds.shape is missing, but must be [tokens, 8] with 1 to 4 tokens"),
    (embeds_part(shape=[1, 4, 8]), "image_embeds.shape is [1, 4, 8], but must be [tokens, 8]"),
    (embeds_part(shape=[8, 4]), "image_embeds.shape is [8, 4], but must be [tokens, 8]"),
    (embeds_part(shape=[0, 8]), "image_embeds.shape is [0, 8], but must be [tokens, 8] with 1 to 4 tokens"),
    (embeds_part(shape=[-1, 8]), "image_embeds.shape is [-1, 8]"),
    (embeds_part(shape=[5, 8]), "image_embeds.shape is [5, 8], but must be [tokens, 8] with 1 to 4 tokens"),
    (embeds_part(shape=[True, 8]), "image_embeds.shape is [True, 8]"),
    (embeds_part(shape=[4.0, 8]), "image_embeds.shape is [4.0, 8]"),
    (embeds_part(grid=[1, 2, 2]), "image_embeds.grid is [1, 2, 2], but positions of llava have no grid"),
    (embeds_part(bytes(124) + struct.pack("<f", math.nan)), "a value that is NaN or infinite"),
    (embeds_part(struct.pack("<f", -math.inf) + bytes(124)), "a value that is NaN or infinite"),
    ({"type": "video_url", "video_url": {"url": "http://x"}}, "video_url parts are not supported"),
]


@pytest.mark.parametrize(("part", "message"), BAD_PARTS)
async def test_a_bad_part_is_400_with_its_path(serve: Any, folder: Path, part: Any, message: str) -> None:
    async with serve(folder=folder, enable_mm_embeds=True) as served:
        path = "messages.0.content.1" + (".image_url.detail" if "detail is" in message else "")
        assert message in await refusal(served, part, path=path)


@pytest.mark.covers("B.images.14")
async def test_embeds_are_refused_without_their_flag(serve: Any, folder: Path) -> None:
    async with serve(folder=folder) as served:
        message = await refusal(served, embeds_part())

        assert message == (
            "messages.0.content.1: image_embeds parts are off: start the scheduler with --enable-mm-embeds"
        )


@pytest.mark.parametrize("grid", [None, [2, 2], [1, 2, 3], [2, 1, 2], [1, -2, -2], [1, 4.0, 1], "1x2x2"])
def test_embeds_of_a_model_with_grids_need_theirs(grid: Any) -> None:
    family = vision_family(QWEN, QWEN_PROCESSOR)
    assert family is not None
    vision, sent = VisionCheckpoint(family, b"", HIDDEN_SIZE), embeds_part(grid=[1, 1, 4])["image_embeds"]

    assert read_embeds(sent, vision).tokens == ImageTokens(4, (1, 1, 4))
    with pytest.raises(InvalidRequest, match=r"must be \[1, rows, columns\] with rows x columns = 4"):
        read_embeds(sent | {"grid": grid}, vision)
    with pytest.raises(InvalidRequest, match="with 1 to 16384 tokens"):
        read_embeds(sent | {"shape": [16385, HIDDEN_SIZE]}, vision)


def redirect_to(location: str) -> bytes:
    """Return a redirect."""
    return answer("302 Found", b"", f"Location: {location}")


ANSWERS: list[tuple[bytes, str]] = [
    (answer("404 Not Found", b"no cat"), "the server answered 404 Not Found: no cat"),
    (answer("503 Service Unavailable"), "the server answered 503 Service Unavailable (tried 3 times)"),
    (redirect_to("http://127.0.0.2/cat.png"), "127.0.0.2 is not a public address"),
    (redirect_to("http://169.254.169.254/"), "pdserve never connects to 169.254.169.254"),
    (redirect_to("file:///etc/hostname"), "begins with http:// or https://"),
    (ok(b"<html>"), NO_IMAGE),
    (ok(b"", "Content-Encoding: gzip"), "Content-Encoding 'gzip'"),
    (ok(b"x" * 2000), "2000 bytes are above the limit of 1500"),
    (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000, "the file is above the limit of 1500 bytes"),
]


@pytest.mark.parametrize(("answered", "message"), ANSWERS, ids=[message for _, message in ANSWERS])
async def test_a_servers_bad_answer_is_400_with_the_part(
    serve: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, answered: bytes, message: str
) -> None:
    for module in (image_limits, image_source):
        monkeypatch.setattr(module, "MAX_IMAGE_BYTES", 1500)
    async with raw_server(in_turn(answered)) as server, serve(folder=folder, **HERE) as served:
        assert message in await refusal(served, image_part(server.url()))


async def test_a_server_that_does_not_answer_is_400_in_time(serve: Any, folder: Path) -> None:
    async def silent(request: Request) -> None:
        await request.reader.read()

    async with raw_server(silent) as server, serve(folder=folder, image_fetch_timeout=0.05, **HERE) as served:
        assert "not done within 0.05 s" in await refusal(served, image_part(server.url()))


@pytest.mark.covers("B.images.3")
async def test_only_allowed_hosts_are_contacted(serve: Any, folder: Path) -> None:
    async with (
        raw_server(in_turn(redirect_to("http://localhost:1/"))) as server,
        serve(folder=folder, allowed_media_domains=("127.0.0.1",), **HERE) as served,
    ):
        assert "example.com is not one of the allowed hosts" in await refusal(served, image_part("http://example.com/"))
        assert "localhost is not one of the allowed hosts" in await refusal(served, image_part(server.url()))
        assert len(server.requests) == 1


def _link(folder: Path) -> str:
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    return f"file://{folder}/link.png"


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.png")
    return f"file://{folder}/pipe.png"


@pytest.mark.parametrize(
    "url_in",
    [
        lambda folder: f"file://{folder}/missing.png", lambda folder: f"file://{folder}/../outside.png",
        lambda folder: f"file://{folder}/%2e%2e/outside.png", lambda folder: f"file://{folder}",
        lambda folder: f"file://{folder}/a%00b", _link, _pipe,
    ],
)  # fmt: skip
async def test_no_file_outside_the_allowed_folder_is_read(
    serve: Any, folder: Path, tmp_path: Path, url_in: Callable[[Path], str]
) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (tmp_path / "outside.png").write_bytes(PNG)
    async with serve(folder=folder, allowed_local_media_path=str(allowed)) as served:
        reported = await refusal(served, image_part(url_in(allowed)))

        assert reported == "messages.0.content.1: no such file below --allowed-local-media-path"


@pytest.mark.covers("B.images.7")
async def test_too_many_images_are_400_with_the_limit(serve: Any, folder: Path) -> None:
    async with serve(folder=folder, limit_mm_per_prompt=2) as served:
        for third in (GOOD, embeds_part()):
            reported = await refusal(served, GOOD, GOOD, third, path="messages.0.content.3")

            assert "a chat has 3 images, but the limit is 2 (--limit-mm-per-prompt)" in reported


@pytest.mark.parametrize(
    ("fields", "template", "message"),
    [
        ({"truncate_prompt_tokens": 4}, PARTS, "a prompt with images cannot be truncated"),
        ({}, PARTS.replace("<image>", "picture"), "printed 0 placeholders (<image>) for 1 image"),
        ({}, PARTS.replace("<image>", "<image><image>"), "printed 2 placeholders (<image>) for 1 image"),
    ],
)
async def test_a_prompt_that_would_lose_images_is_400(
    serve: Any, tmp_path: Path, fields: Any, template: str, message: str
) -> None:
    async with serve(folder=write_vision_model(tmp_path, template)) as served:
        body = {"model": served.model, "messages": chat("hello", GOOD)} | fields
        response = await served.client.post(PATH, json=body)

        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
