"""Uploads to a server that refuses, cuts, stalls and loses its answers (C23)."""

import asyncio
import base64
import hashlib
import os
import traceback
from dataclasses import replace
from pathlib import Path

import pytest

from remote_files.limits import Retries, UploadLimits, Waits
from remote_files.upload import upload
from tests.remote_files.raw_server import LOOPBACK, Handler, Request, answer, in_turn, ok, raw_server
from wire.errors import ConfigError, PdserveError, Unavailable

pytestmark = pytest.mark.anyio

BODY = b'{"custom_id": "a", "error": null}\n' * 100
BIG = b"0123456789abcdef" * (1 << 18)  # 4 MiB: more than the sockets hold
V2 = "/bucket/out.jsonl?AWSAccessKeyId=SECRETID&Signature=SECRET%2bSECRET%3D&Expires=1715800091"
V4 = "/bucket/out.jsonl?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-SignedHeaders=host&X-Amz-Signature=SECRET%2b"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message><Sig>SECRET+SECRET=</Sig></Error>"
LIMITS = UploadLimits(
    expect_s=5, waits=Waits(connect_s=5, idle_s=5), retries=Retries(tries=3, first_delay_s=0.001, max_delay_s=0.01)
)
HASTY = replace(LIMITS, waits=Waits(connect_s=5, idle_s=0.1))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a file of results."""
    path = tmp_path / "results.jsonl"
    path.write_bytes(BODY)
    return path


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """Return a file that fills the sockets and is sent only after 100 Continue."""
    path = tmp_path / "big.jsonl"
    path.write_bytes(BIG)
    return path


def _content(path: Path) -> bytes:
    return path.read_bytes()


async def _refusal(handler: Handler, path: Path, limits: UploadLimits = LIMITS) -> tuple[str, list[Request]]:
    """Return the error of an upload that fails, and the server's requests."""
    before = _content(path)
    async with raw_server(handler) as server:
        with pytest.raises(PdserveError) as caught:
            await upload(path, server.url(V2), rules=LOOPBACK, limits=limits)

        assert _content(path) == before
        words = f"{type(caught.value).__name__}: {caught.value}"
        assert "SECRET" not in words + "".join(traceback.format_exception(caught.value))
        return words, server.requests


@pytest.mark.covers("A1.14")
@pytest.mark.parametrize("status", ["200 OK", "201 Created", "204 No Content"])
async def test_one_put_carries_the_whole_file(small: Path, status: str) -> None:
    async with raw_server(in_turn(answer(status))) as server:
        num_bytes = await upload(small, server.url("/out"), rules=LOOPBACK, limits=LIMITS)

        (request,) = server.requests
        assert num_bytes == len(BODY)
        assert request.body == BODY
        assert request.line == "PUT /out HTTP/1.1"


@pytest.mark.covers("A1.15")
@pytest.mark.parametrize(("path", "md5_may_go"), [(V2, False), (V4, True), ("/out?a=%2b+b", True)])
async def test_a_signed_put_is_exact_and_adds_no_header(small: Path, path: str, md5_may_go: bool) -> None:
    async with raw_server(in_turn(ok(b""))) as server:
        await upload(small, server.url(path), rules=LOOPBACK, limits=LIMITS)

        (request,) = server.requests
        md5 = base64.b64encode(hashlib.md5(BODY).digest()).decode()
        assert request.target == path
        assert request.headers == {
            "host": f"127.0.0.1:{server.port}", "accept": "*/*", "accept-encoding": "identity", "user-agent": "pdserve",
            "connection": "close", "content-length": str(len(BODY)), **({"content-md5": md5} if md5_may_go else {}),
        }  # fmt: skip


async def test_an_empty_file_is_sent(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    async with raw_server(in_turn(ok(b""))) as server:
        assert await upload(empty, server.url(), rules=LOOPBACK, limits=LIMITS) == 0

        assert server.requests[0].headers["content-length"] == "0"


async def test_a_big_file_is_sent_after_100_continue(big: Path) -> None:
    reported: list[tuple[int, int | None]] = []
    async with raw_server(in_turn(ok(b""))) as server:
        await upload(big, server.url(V2), rules=LOOPBACK, limits=LIMITS, on_bytes=lambda *seen: reported.append(seen))

        (request,) = server.requests
        assert request.headers["expect"] == "100-continue"
        assert request.body == BIG
    assert reported == sorted(reported)
    assert reported[-1] == (len(BIG), len(BIG))


@pytest.mark.covers("A1.14")
async def test_a_permanent_403_fails_at_once_in_the_servers_words(small: Path) -> None:
    words, requests = await _refusal(in_turn(answer("403 Forbidden", DENIED)), small)

    assert words.startswith("ConfigError: http://127.0.0.1:")
    assert words.endswith(
        "/bucket/out.jsonl?(hidden): the server answered 403 Forbidden: AccessDenied: Request has expired "
        "(this presigned URL is valid until 2024-05-15 19:08:11 UTC)"
    )
    assert len(requests) == 1


@pytest.mark.parametrize("reads", [0, 100_000], ids=["before the body", "within the body"])
@pytest.mark.parametrize("expects_continue", [True, False])
async def test_an_early_403_is_read_even_if_the_body_is_not(big: Path, reads: int, expects_continue: bool) -> None:
    async def refuse(request: Request) -> None:
        if reads and expects_continue:
            await request.say(b"HTTP/1.1 100 Continue\r\n\r\n")
        await request.read_body(reads)
        await request.say(answer("403 Forbidden", DENIED))
        while await request.reader.read(len(BIG)):
            pass  # until the other end closes: closing first might lose the answer

    limits = LIMITS if expects_continue else replace(LIMITS, expect_from_bytes=len(BIG) + 1)
    words, requests = await _refusal(refuse, big, limits)

    assert "the server answered 403 Forbidden: AccessDenied: Request has expired" in words
    assert len(requests) == 1


@pytest.mark.covers("A1.14")
@pytest.mark.parametrize(
    "bad",
    [answer("503 Slow Down"), answer("500 Oops"), answer("429 Too Many"), b"", b"HTTP/1.1 200", b"no HTTP\r\n\r\n"],
    ids=["503", "500", "429", "lost answer", "half an answer", "no HTTP"],
)
@pytest.mark.parametrize("content", [BODY, BIG], ids=["small", "big"])
async def test_a_transient_failure_is_retried_with_the_same_bytes(tmp_path: Path, content: bytes, bad: bytes) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(content)
    async with raw_server(in_turn(bad, bad, ok(b""))) as server:
        await upload(path, server.url(V2), rules=LOOPBACK, limits=LIMITS)

        assert [request.body for request in server.requests] == [content] * 3
    words, requests = await _refusal(in_turn(bad), path)

    assert words.startswith("Unavailable: ")
    assert words.endswith("(tried 3 times)")
    assert len(requests) == 3


async def test_a_connection_cut_within_the_body_is_retried_with_all_bytes(big: Path) -> None:
    cut: list[bytes] = []

    async def cut_once(request: Request) -> None:
        await request.say(b"HTTP/1.1 100 Continue\r\n\r\n")
        cut.append(await request.read_body(100_000 if not cut else None))
        if len(cut) > 1:
            await request.say(ok(b""))

    async with raw_server(cut_once) as server:
        await upload(big, server.url(V2), rules=LOOPBACK, limits=LIMITS)

    assert [len(body) for body in cut] == [100_000, len(BIG)]
    assert cut[1] == BIG


@pytest.mark.parametrize("says_no_by", ["silence", "a 417"])
async def test_a_server_without_100_continue_gets_the_body_anyway(big: Path, says_no_by: str) -> None:
    async def old_server(request: Request) -> None:
        if "expect" in request.headers and says_no_by == "a 417":
            await request.say(answer("417 Expectation Failed"))
            return
        await request.read_body()
        await request.say(ok(b""))

    async with raw_server(old_server) as server:
        await upload(big, server.url(V2), rules=LOOPBACK, limits=replace(LIMITS, expect_s=0.1))

        assert ["expect" in request.headers for request in server.requests] == [True, False]
        assert server.requests[-1].body == BIG


async def test_a_200_before_the_whole_body_is_a_failure(big: Path) -> None:
    async def send_early(request: Request) -> None:
        await request.say(ok(b""))

    words, requests = await _refusal(send_early, big)

    assert f"the server answered 200 after 0 of {len(BIG)} bytes (tried 3 times)" in words
    assert len(requests) == 3


async def test_a_put_is_never_redirected(small: Path) -> None:
    words, requests = await _refusal(in_turn(answer("307 Temporary", b"", "Location: http://127.0.0.1:1/")), small)

    assert words.endswith("the server answered 307, and redirects of a PUT are not followed")
    assert len(requests) == 1


@pytest.mark.parametrize("read", [0, 100_000, None], ids=["takes nothing", "takes a part", "never answers"])
async def test_a_server_that_is_too_slow_is_given_up(big: Path, read: int | None) -> None:
    async def slow(request: Request) -> None:
        if "expect" in request.headers:
            await request.say(b"HTTP/1.1 100 Continue\r\n\r\n")
        await request.read_body(read)
        await asyncio.Event().wait()

    words, requests = await _refusal(slow, big, HASTY)

    assert words.startswith("Unavailable: ")
    assert words.endswith(" within 0.1 s (tried 3 times)")
    assert len(requests) == 3


async def test_all_attempts_together_have_a_deadline(small: Path) -> None:
    async def stall(request: Request) -> None:
        await asyncio.Event().wait()

    words, _ = await _refusal(stall, small, replace(LIMITS, whole_s=0.1))

    assert words.startswith("DeadlineExceeded: ")
    assert words.endswith("?(hidden): not done within 0.1 s")


async def test_a_missing_file_is_named_before_any_connection(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file or directory"):
        await upload(tmp_path / "none.jsonl", "http://127.0.0.1:1/out", rules=LOOPBACK)


@pytest.mark.parametrize("content", [b"other\n", BODY.upper()], ids=["shorter", "as long"])
async def test_a_file_that_changes_between_attempts_is_not_sent(small: Path, content: bytes) -> None:
    os.utime(small, (0, 0))  # long before: a file system's clock may be coarse

    async def change(request: Request) -> None:
        await request.read_body()
        small.write_bytes(content)  # noqa: ASYNC240 - a test may wait

    async with raw_server(change) as server:
        with pytest.raises(ConfigError, match=f"the file changed while it was sent: it had {len(BODY)} bytes"):
            await upload(small, server.url(), rules=LOOPBACK, limits=LIMITS)

        assert len(server.requests) == 1


async def test_a_missing_server_is_named(small: Path) -> None:
    async with raw_server(in_turn(b"")) as server:
        url = server.url(V2)

    with pytest.raises(Unavailable, match=r"\(hidden\): no connection to 127.0.0.1:\d+: Connection refused \(tried 3"):
        await upload(small, url, rules=LOOPBACK, limits=LIMITS)


MD5 = hashlib.md5(BODY).digest()
OTHER = hashlib.md5(b"torn").digest()
S3 = "x-amz-request-id: 1"


def _stored_answer(*headers: str) -> bytes:
    return answer("200 OK", b"", *headers)


def _etag(md5: bytes) -> str:
    return f'ETag: "{md5.hex()}"'


def _base64(md5: bytes) -> str:
    return base64.b64encode(md5).decode()


CORRUPT = {
    "S3": (S3, _etag(OTHER)),
    "S3 by its own key": (S3, _etag(OTHER), "x-amz-server-side-encryption: AES256"),
    "OBS": ("x-obs-request-id: 1", _etag(OTHER)),
    "OSS": ("x-oss-request-id: 1", f"ETag: {OTHER.hex().upper()}"),
    "Google": ("x-goog-hash: crc32c=AAAAAA==", f"x-goog-hash: md5={_base64(OTHER)}"),
    "Azure": ("x-ms-request-id: 1", f"Content-MD5: {_base64(OTHER)}"),
}


@pytest.mark.parametrize("corrupt", CORRUPT.values(), ids=CORRUPT)
async def test_an_upload_stored_differently_is_sent_again(small: Path, corrupt: tuple[str, ...]) -> None:
    whole = [line.replace(OTHER.hex(), MD5.hex()).replace(_base64(OTHER), _base64(MD5)) for line in corrupt]
    whole = [line.replace(OTHER.hex().upper(), MD5.hex().upper()) for line in whole]
    async with raw_server(in_turn(_stored_answer(*corrupt), _stored_answer(*whole))) as server:
        await upload(small, server.url(V2), rules=LOOPBACK, limits=LIMITS)

        assert [request.body for request in server.requests] == [BODY, BODY]


async def test_a_store_that_keeps_other_bytes_fails_with_both_checksums(small: Path) -> None:
    words, requests = await _refusal(in_turn(_stored_answer(*CORRUPT["S3"])), small)

    assert f": the stored file has MD5 {OTHER.hex()}, but the local file has {MD5.hex()} (tried 3 times)" in words
    assert len(requests) == 3


@pytest.mark.parametrize(
    "headers",
    [
        (_etag(OTHER),), (S3, 'ETag: "opaque"'), (S3, f'ETag: "{OTHER.hex()}-2"'), (S3, _etag(MD5)), (S3,),
        (S3, _etag(OTHER), "x-amz-server-side-encryption: aws:kms"),
        (S3, _etag(OTHER), "x-amz-server-side-encryption-customer-algorithm: AES256"),
        ("x-obs-request-id: 1", _etag(OTHER), "x-obs-server-side-encryption: kms"),
        (f"Content-MD5: {_base64(OTHER)}",), ("x-goog-hash: crc32c=AAAAAA==",), ("x-goog-hash: md5=!",),
    ],
    ids=" ".join,
)  # fmt: skip
async def test_etags_that_are_no_md5_are_not_compared(small: Path, headers: tuple[str, ...]) -> None:
    async with raw_server(in_turn(_stored_answer(*headers))) as server:
        await upload(small, server.url(V2), rules=LOOPBACK, limits=LIMITS)

        assert len(server.requests) == 1


async def test_a_store_given_content_md5_compares_it_itself(small: Path) -> None:
    async with raw_server(in_turn(_stored_answer(*CORRUPT["S3"]))) as server:
        await upload(small, server.url(V4), rules=LOOPBACK, limits=LIMITS)

        assert len(server.requests) == 1
