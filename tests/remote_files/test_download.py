"""Downloads from a server that cuts, slows, lies and floods (C23, reliability 2.6)."""

import asyncio
import base64
import contextlib
import gzip
import hashlib
import logging
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from remote_files.download import download
from remote_files.limits import DownloadLimits, Retries, Waits
from tests.remote_files.raw_server import LOOPBACK, Handler, Request, answer, in_turn, ok, raw_server
from wire.errors import DeadlineExceeded, PdserveError, Unavailable

pytestmark = pytest.mark.anyio

BODY = b'{"custom_id": "a"}\n' * 40
SIGNED = "/bucket/in.jsonl?AWSAccessKeyId=SECRETID&Signature=SECRET%2bSECRET%3D&Expires=1715800091"
EXPIRED = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message><Sig>SECRET+SECRET=</Sig></Error>"
RETRIES = Retries(tries=3, first_delay_s=0.001, max_delay_s=0.01)
LIMITS = DownloadLimits(max_bytes=1000, waits=Waits(connect_s=5, idle_s=5), retries=RETRIES)
HASTY = replace(LIMITS, waits=Waits(connect_s=5, idle_s=0.1, floor_bytes_per_s=1000))


def _names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def _refusal(handler: Handler, to: Path, path: str = "/file", limits: DownloadLimits = LIMITS) -> tuple[str, int]:
    """Return the error of a download that fails, with its traceback, and the number of requests."""
    async with raw_server(handler) as server:
        with pytest.raises(PdserveError) as caught:
            await download(server.url(path), to, rules=LOOPBACK, limits=limits)

        assert _names_in(to.parent) == []
        words = f"{type(caught.value).__name__}: {caught.value}"
        assert "SECRET" not in words + "".join(traceback.format_exception(caught.value))
        return words, len(server.requests)


@pytest.mark.covers("A1.13")
async def test_a_remote_file_is_fetched_completely(tmp_path: Path) -> None:
    to = tmp_path / "in.jsonl"
    async with raw_server(in_turn(ok(BODY))) as server:
        num_bytes = await download(server.url(), to, rules=LOOPBACK, limits=LIMITS)

    assert num_bytes == len(BODY)
    assert to.read_bytes() == BODY
    assert _names_in(tmp_path) == ["in.jsonl"]


@pytest.mark.covers("A1.15")
@pytest.mark.parametrize("path", [SIGNED, "/a/../b//c?x=%2b+%7E~;=&&y=%zz?/@:", "/%61?%41", "/a?X-Amz-Signature=%2B"])
async def test_path_and_query_are_sent_unchanged_and_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with raw_server(in_turn(ok(BODY))) as server:
        await download(server.url(path), tmp_path / "in", rules=LOOPBACK, limits=LIMITS)

        (request,) = server.requests
        assert request.line == f"GET {path} HTTP/1.1"
        assert request.headers == {
            "host": f"127.0.0.1:{server.port}", "accept": "*/*", "accept-encoding": "identity", "user-agent": "pdserve",
            "connection": "close",
        }  # fmt: skip


@pytest.mark.covers("A1.13")
async def test_a_404_fails_at_once_in_the_servers_words(tmp_path: Path) -> None:
    words, tries = await _refusal(in_turn(answer("404 Not Found", b"no such\r\n  file")), tmp_path / "in")

    assert words.startswith("ConfigError: http://127.0.0.1:")
    assert words.endswith("/file: the server answered 404 Not Found: no such file")
    assert tries == 1


async def test_an_expired_url_fails_at_once_with_its_expiry(tmp_path: Path) -> None:
    words, tries = await _refusal(in_turn(answer("403 Forbidden", EXPIRED)), tmp_path / "in", SIGNED)

    assert words.endswith(
        "/bucket/in.jsonl?(hidden): the server answered 403 Forbidden: AccessDenied: Request has expired "
        "(this presigned URL is valid until 2024-05-15 19:08:11 UTC)"
    )
    assert tries == 1


@pytest.mark.parametrize(
    "bad",
    [
        answer("500 Oops"), answer("503 Slow Down", b"", "Retry-After: 99999"),
        answer("429 Too Many", b"", "Retry-After: x"), b"", b"HTTP/1.1 200 OK\r\n", b"no HTTP\r\n\r\n", ok(BODY)[:-1],
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        ok(BODY, "Content-MD5: " + "A" * 22 + "=="),
    ],
    ids=["500", "503", "429", "nothing", "half a head", "no HTTP", "cut", "chunks cut", "wrong checksum"],
)  # fmt: skip
async def test_a_transient_failure_is_retried(tmp_path: Path, bad: bytes) -> None:
    words, tries = await _refusal(in_turn(bad), tmp_path / "in", SIGNED)
    async with raw_server(in_turn(bad, bad, ok(BODY))) as server:
        await download(server.url(), tmp_path / "in", rules=LOOPBACK, limits=LIMITS)
        assert len(server.requests) == 3

    assert (tmp_path / "in").read_bytes() == BODY
    assert words.startswith("Unavailable: http://127.0.0.1:")
    assert words.endswith("(tried 3 times)")
    assert tries == 3


async def test_no_log_line_has_the_secrets_of_a_url(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bad = answer("503 Slow Down", EXPIRED)
    async with raw_server(in_turn(bad, b"", ok(BODY)[:-1], ok(BODY))) as server:
        url = server.url(SIGNED)
        await download(url, tmp_path / "in", rules=LOOPBACK, limits=replace(LIMITS, retries=replace(RETRIES, tries=4)))

    assert len([line for line in caplog.messages if line.startswith("transfer_retried")]) == 3
    assert "SECRET" not in caplog.text


async def test_a_missing_server_is_named(tmp_path: Path) -> None:
    async with raw_server(in_turn(b"")) as server:
        url = server.url(SIGNED)

    with pytest.raises(Unavailable, match=r"\(hidden\): no connection to 127.0.0.1:\d+: Connection refused \(tried 3"):
        await download(url, tmp_path / "in", rules=LOOPBACK, limits=LIMITS)


async def test_a_length_above_the_limit_is_refused_before_the_body(tmp_path: Path) -> None:
    words, tries = await _refusal(in_turn(b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n"), tmp_path / "in", SIGNED)

    assert words.startswith("ConfigError: ")
    assert words.endswith("(hidden): 1001 bytes are above the limit of 1000")
    assert tries == 1


async def test_a_body_without_end_is_refused_at_the_limit(tmp_path: Path) -> None:
    async def flood(request: Request) -> None:
        await request.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await request.say(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")

    words, tries = await _refusal(flood, tmp_path / "in")

    assert words.startswith("ConfigError: ")
    assert words.endswith("the file is above the limit of 1000 bytes")
    assert tries == 1


@pytest.mark.parametrize("status", ["403 Forbidden", "500 Oops"])
async def test_an_error_without_end_is_read_in_part(tmp_path: Path, status: str) -> None:
    async def flood(request: Request) -> None:
        await request.say(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        while True:
            await request.say(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")

    words, _ = await _refusal(flood, tmp_path / "in")

    assert f"the server answered {status}: xxx" in words
    assert len(words) < 500


@pytest.mark.parametrize(
    ("head", "end"),
    [("Transfer-Encoding: chunked", "6\r\nhello\n\r\n0\r\n\r\n"), ("Connection: close", "hello\n")],
    ids=["chunked", "until the end of the connection"],
)
async def test_a_file_without_a_length_is_fetched(tmp_path: Path, head: str, end: str) -> None:
    to = tmp_path / "in"
    async with raw_server(in_turn(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n{end}".encode())) as server:
        await download(server.url(), to, rules=LOOPBACK, limits=LIMITS)

    assert to.read_bytes() == b"hello\n"


async def test_a_compressed_file_is_not_decompressed(tmp_path: Path) -> None:
    bomb = gzip.compress(b"0" * 10_000_000)[:900]

    words, tries = await _refusal(in_turn(ok(bomb, "Content-Encoding: gzip")), tmp_path / "in")

    assert words.endswith("the file is stored with Content-Encoding 'gzip'; store it without one")
    assert tries == 1


async def test_a_header_value_mentioning_chunked_is_no_chunked_body(tmp_path: Path) -> None:
    async with raw_server(in_turn(ok(BODY, "Content-Encoding: aws-chunked"))) as server:
        assert await download(server.url(), tmp_path / "in", rules=LOOPBACK, limits=LIMITS) == len(BODY)


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial Content", "304 Not Modified", "501 Not Implemented"])
async def test_only_status_200_is_a_success(tmp_path: Path, status: str) -> None:
    words, tries = await _refusal(in_turn(answer(status)), tmp_path / "in")

    assert words.endswith(f"the server answered {status}")
    assert tries == 1


def _then_silent(*message: bytes) -> Handler:
    async def handle(request: Request) -> None:
        for piece in message:
            await request.say(piece)
        await asyncio.Event().wait()

    return handle


def _slow_answer() -> Handler:
    async def handle(request: Request) -> None:
        await request.say(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            await request.say(b"x")
            await asyncio.sleep(0.005)  # A slow server is what is tested.

    return handle


@pytest.mark.parametrize(
    "slow",
    [
        lambda: _then_silent(), lambda: _then_silent(b"HTTP/1.1 200"), lambda: _then_silent(ok(BODY)[:-5]),
        lambda: _then_silent(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"),
        lambda: _then_silent(b"HTTP/1.1 403 No\r\nContent-Length: 9\r\n\r\nx"), _slow_answer,
    ],
    ids=["silent", "half a line", "stalled", "stalled early", "stalled error", "a byte at a time"],
)  # fmt: skip
async def test_a_server_that_is_too_slow_is_given_up(tmp_path: Path, slow: Callable[[], Handler]) -> None:
    words, _ = await _refusal(slow(), tmp_path / "in", SIGNED, HASTY)

    # On a slow machine either may be missed first.
    missed = r"no (answer|more bytes of the answer|further 100 bytes) within 0\.1 s \(tried 3 times\)"
    assert re.fullmatch(rf"Unavailable: http://\S+/bucket/in\.jsonl\?\(hidden\): {missed}", words)


async def test_all_attempts_together_have_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"\(hidden\): not done within 0.1 s"):
        async with raw_server(_then_silent()) as server:
            await download(server.url(SIGNED), tmp_path / "in", rules=LOOPBACK, limits=replace(LIMITS, whole_s=0.1))


async def test_checksums_of_the_answer_are_checked(tmp_path: Path) -> None:
    def checksum_headers(digest: bytes) -> str:
        return base64.b64encode(digest).decode()

    md5, sha256 = hashlib.md5(BODY).digest(), hashlib.sha256(BODY).digest()
    good = ok(
        BODY,
        f"Content-MD5: {checksum_headers(md5)}",
        f"Content-Digest: sha-512=:AA==:, sha-256=:{checksum_headers(sha256)}:",
    )
    bad = ok(
        BODY,
        f"x-amz-checksum-sha256: {checksum_headers(md5 + md5)}",
        f"x-goog-hash: crc32c=AA==,md5={checksum_headers(md5)}",
    )
    corrupt = ok(BODY, "x-goog-hash: crc32c=AA==", f"x-goog-hash: md5={checksum_headers(hashlib.md5(b'').digest())}")
    async with raw_server(in_turn(bad, corrupt, good)) as server:
        await download(server.url(), tmp_path / "in", rules=LOOPBACK, limits=LIMITS)

        assert len(server.requests) == 3


@pytest.mark.parametrize(
    "header", ['ETag: "0"', "Content-MD5: !", "Content-MD5: AA==", "x-amz-checksum-sha256: AA==-2"]
)
async def test_headers_that_are_no_checksum_of_the_file_are_ignored(tmp_path: Path, header: str) -> None:
    async with raw_server(in_turn(ok(BODY, header))) as server:
        assert await download(server.url(), tmp_path / "in", rules=LOOPBACK, limits=LIMITS) == len(BODY)


async def test_progress_counts_up_to_the_length(tmp_path: Path) -> None:
    checksum_headers: list[tuple[int, int | None]] = []
    async with raw_server(in_turn(ok(BODY))) as server:
        await download(
            server.url(),
            tmp_path / "in",
            rules=LOOPBACK,
            limits=LIMITS,
            on_bytes=lambda *seen: checksum_headers.append(seen),
        )

    assert checksum_headers[-1] == (len(BODY), len(BODY))
    assert checksum_headers == sorted(checksum_headers)


async def test_a_cancelled_download_leaves_nothing(tmp_path: Path) -> None:
    async with raw_server(_then_silent(ok(BODY)[:-5])) as server:
        begun = asyncio.Event()
        task = asyncio.ensure_future(
            download(server.url(), tmp_path / "in", rules=LOOPBACK, limits=LIMITS, on_bytes=lambda *_: begun.set())
        )
        await begun.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    assert task.cancelled()
    assert _names_in(tmp_path) == []
