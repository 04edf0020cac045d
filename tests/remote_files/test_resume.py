"""A download that is cut off continues where it was, if the server still has that very file."""

import asyncio
import base64
import hashlib
import os
from pathlib import Path

import pytest

from remote_files.digests import Digests
from remote_files.download import download
from remote_files.limits import DownloadLimits, Retries, Waits
from remote_files.part import FilePart
from tests.remote_files.raw_server import LOOPBACK, Request, answer, ok, raw_server
from wire.errors import PdserveError

pytestmark = pytest.mark.anyio

BODY = bytes(range(256)) * 4
CUT = 700
CHUNK = b"320\r\n"  # before 800 bytes
TAG = 'ETag: "v1"'
LIMITS = DownloadLimits(
    max_bytes=5000, waits=Waits(connect_s=5, idle_s=5), retries=Retries(tries=3, first_delay_s=0.001, max_delay_s=0.01)
)
SIGNED = "/in.jsonl?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-SignedHeaders=host&X-Amz-Signature=SECRET"


def rest(begin: int, body: bytes = BODY, *headers: str) -> bytes:
    """Return a 206 with what follows from `begin` on."""
    reported = f"Content-Range: bytes {begin}-{len(body) - 1}/{len(body)}"
    return answer("206 Partial Content", body[begin:], reported, *headers)


class Cutting:
    """Cuts its first answer once the client has `CUT` bytes of it; then sends the given ones, the last repeatedly."""

    def __init__(self, first: bytes, *later: bytes) -> None:
        self.seen: list[int] = []
        self._first = first
        self._later = list(later)
        self._arrived = asyncio.Event()

    def see(self, num_bytes: int, length: int | None) -> None:
        """Record the client's progress."""
        self.seen.append(num_bytes)
        if num_bytes >= CUT - len(CHUNK):
            self._arrived.set()

    async def handle(self, request: Request) -> None:
        """Answer one request."""
        if self._first:
            first, self._first = self._first, b""
            head, mark, body = first.partition(b"\r\n\r\n")
            await request.say(head + mark + body[:CUT])
            await self._arrived.wait()
            return
        await request.say(self._later.pop(0) if len(self._later) > 1 else self._later[0])


async def _fetch(cutting: Cutting, to: Path, path: str = SIGNED) -> list[Request]:
    async with raw_server(cutting.handle) as server:
        num_bytes = await download(server.url(path), to, rules=LOOPBACK, limits=LIMITS, on_bytes=cutting.see)

        assert num_bytes == len(BODY)
        assert os.listdir(to.parent) == [to.name]
        return server.requests


async def test_a_cut_download_requests_only_the_rest(tmp_path: Path) -> None:
    cutting = Cutting(ok(BODY, TAG), rest(CUT, BODY, TAG))

    first, second = await _fetch(cutting, tmp_path / "in")

    assert (tmp_path / "in").read_bytes() == BODY
    assert "range" not in first.headers
    assert (second.headers["range"], second.headers["if-range"]) == (f"bytes={CUT}-", '"v1"')
    assert second.target == SIGNED
    assert cutting.seen == sorted(cutting.seen)


async def test_the_first_answers_checksum_is_that_of_the_whole_file(tmp_path: Path) -> None:
    def reported(body: bytes) -> str:
        return f"Content-MD5: {base64.b64encode(hashlib.md5(body).digest()).decode()}"

    good = Cutting(ok(BODY, TAG, reported(BODY)), rest(CUT, BODY, reported(BODY[CUT:])))
    await _fetch(good, tmp_path / "in")
    corrupt = Cutting(ok(BODY, TAG, reported(BODY)), rest(CUT, BODY[::-1], TAG), ok(BODY, TAG))
    requests = await _fetch(corrupt, tmp_path / "in")

    assert (tmp_path / "in").read_bytes() == BODY
    assert "range" not in requests[2].headers, "what does not pass its check is fetched from the beginning"


@pytest.mark.parametrize(
    "answered",
    [
        ok(BODY[::-1], 'ETag: "v2"'),
        answer("416 Range Not Satisfiable"),
        rest(CUT, BODY[::-1], 'ETag: "v2"'),
        rest(CUT - 1),
        rest(CUT, BODY + b"more"),
        answer("206 Partial Content", BODY[CUT:-1], f"Content-Range: bytes {CUT}-{len(BODY) - 2}/{len(BODY)}"),
        answer("206 Partial Content", BODY[CUT:]),
    ],
    ids=["200", "416", "another file", "another place", "another length", "not to its end", "no range given"],
)
async def test_a_file_that_changed_is_fetched_completely(tmp_path: Path, answered: bytes) -> None:
    await _fetch(Cutting(ok(BODY, TAG), answered, ok(BODY[::-1], 'ETag: "v2"')), tmp_path / "in")

    assert (tmp_path / "in").read_bytes() == BODY[::-1]


@pytest.mark.parametrize("headers", [(), ('ETag: W/"v1"',), ("ETag: v1",), ("Last-Modified: yesterday",)])
async def test_without_a_strong_etag_a_download_starts_again(tmp_path: Path, headers: tuple[str, ...]) -> None:
    requests = await _fetch(Cutting(ok(BODY, *headers), ok(BODY, *headers)), tmp_path / "in")

    assert "range" not in requests[1].headers
    assert (tmp_path / "in").read_bytes() == BODY


async def test_an_error_in_between_loses_nothing(tmp_path: Path) -> None:
    requests = await _fetch(Cutting(ok(BODY, TAG), answer("503 Slow Down"), rest(CUT)), tmp_path / "in")

    assert [one.headers.get("range") for one in requests] == [None, f"bytes={CUT}-", f"bytes={CUT}-"]
    assert (tmp_path / "in").read_bytes() == BODY


async def test_the_limit_is_that_of_the_whole_file(tmp_path: Path) -> None:
    big = b"x" * 5500
    head = f"HTTP/1.1 200 OK\r\n{TAG}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunked = head + CHUNK + b"x" * 800 + b"\r\n"

    with pytest.raises(PdserveError, match="the file is above the limit of 5000 bytes"):
        await _fetch(Cutting(chunked, rest(CUT - len(CHUNK), big)), tmp_path / "in")

    assert os.listdir(tmp_path) == []


def test_no_range_is_requested_if_nothing_or_all_has_arrived() -> None:
    part = FilePart('"v1"', 10, Digests({}))
    assert part.headers == {}

    part.num_bytes = 10
    assert part.headers == {}
