"""A live server: no secret in any message, every failure to answer is Unavailable, connections are bounded."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from batch.url_backend import UrlBackend
from tests.batch.app_server import DEADLINE_S, serving
from tests.security.certificates import Authority
from wire.errors import ConfigError, Unavailable

pytestmark = pytest.mark.anyio
KEY = "key-0123456789"


class RecordingApp:
    """Echoes the key and path of a request; /big returns 4 MiB, compressed; /away redirects."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.now += 1
        self.peak = max(self.peak, self.now)
        shown = dict(scope["headers"]).get(b"authorization", b"none")
        content, status, headers = shown + b" " + scope["path"].encode(), 200, []
        if scope["path"] == "/big":
            content, headers = gzip.compress(b"0" * 2**22), [(b"content-encoding", b"gzip")]
        elif scope["path"] == "/away":
            status, headers = 307, [(b"location", b"/big")]
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        self.now -= 1
        await send({"type": "http.response.body", "body": content})


@asynccontextmanager
async def _silent(greeting: bytes = b"", *, hangs_up: bool = False) -> AsyncIterator[str]:
    """Run a server that sends `greeting` to every client and then nothing more."""

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(greeting)
        if not hangs_up:
            await reader.read()
        writer.close()

    async with await asyncio.start_server(meet, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_key_is_sent_only_to_the_server() -> None:
    async with serving(RecordingApp()) as url, UrlBackend(url, KEY) as backend:
        answer = await backend.send("GET", "/health")

        assert answer.body == f"Bearer {KEY} /health".encode()
        assert KEY not in repr(backend)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_a_base_url_with_v1_at_its_end_is_not_doubled(end: str) -> None:
    async with serving(RecordingApp()) as url, UrlBackend(url + "/base" + end) as backend:
        answer = await backend.send("POST", "/v1/completions", b"{}")

    assert answer.body == b"none /base/v1/completions"


async def test_redirects_are_returned_as_answers() -> None:
    async with serving(RecordingApp()) as url, UrlBackend(url) as backend:
        assert (await backend.send("POST", "/away", b"{}")).status == 307


async def test_a_compressed_answer_is_bounded_by_its_decompressed_size() -> None:
    async with serving(RecordingApp()) as url, UrlBackend(url, max_answer_bytes=2**20) as backend:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:\d+ answers with more than 1048576 bytes"):
            await backend.send("GET", "/big")


async def test_connections_are_bounded() -> None:
    app = RecordingApp()
    async with serving(app) as url, UrlBackend(url, connections=3) as backend:
        await asyncio.gather(*(backend.send("GET", "/x") for _ in range(30)))

    assert 1 <= app.peak <= 3


async def test_a_missing_server_is_unavailable() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with UrlBackend(url, KEY) as backend:
            with pytest.raises(Unavailable, match=r"no connection: Connection refused$") as lost:
                await backend.send("POST", "/v1/x", b"{}")

    assert KEY not in str(lost.value)


async def test_a_server_that_hangs_up_is_unavailable() -> None:
    async with _silent(hangs_up=True) as url, UrlBackend(url) as backend:
        with pytest.raises(Unavailable, match="the connection was lost"):
            await backend.send("POST", "/v1/x", b"{}")


async def test_an_answer_that_is_not_http_is_unavailable_and_not_quoted() -> None:
    async with _silent(b"SSH-2.0-secret\r\n\r\n", hangs_up=True) as url, UrlBackend(url) as backend:
        with pytest.raises(Unavailable) as lost:
            await backend.send("POST", "/v1/x", b"{}")

    assert "secret" not in str(lost.value)


async def test_an_answer_that_is_too_late_is_unavailable() -> None:
    async with _silent() as url, UrlBackend(url, timeout_s=0.05) as backend, asyncio.timeout(DEADLINE_S):
        with pytest.raises(Unavailable, match=r"no complete answer within 0\.05 s"):
            await backend.send("POST", "/v1/x", b"{}")


async def test_an_untrusted_certificate_is_unavailable(tmp_path: Path) -> None:
    files = Authority(tmp_path / "ca").sign("server")

    async with serving(RecordingApp(), files) as url, UrlBackend(url, KEY) as backend:
        with pytest.raises(Unavailable, match=r"https://.*: its certificate is not trusted by this machine"):
            await backend.send("POST", "/v1/x", b"{}")


async def test_https_to_an_http_server_is_reported() -> None:
    async with serving(RecordingApp()) as url, UrlBackend(url.replace("http:", "https:"), KEY) as backend:
        with pytest.raises(Unavailable, match=r"https://.*: no TLS connection: does the server use https://"):
            await backend.send("GET", "/v1/models")


@pytest.mark.parametrize(
    ("url", "words"), [("host:9000", "does not begin with http://"), ("http://", "has no host")]
)  # fmt: skip
def test_an_incomplete_base_url_is_refused_with_the_missing_part(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        UrlBackend(url)


async def test_a_certificate_of_a_trusted_authority_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "ca")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.cert))

    async with serving(RecordingApp(), authority.sign("server")) as url, UrlBackend(url, KEY) as backend:
        assert (await backend.send("POST", "/v1/x", b"{}")).status == 200


@pytest.mark.parametrize(
    "url",
    [
        "", "host:9000", "ftp://host", "file:///etc/passwd", "http://", "http://host:99999", "http://[::1",
        "http://user:pa55word@host", "http://host?token=pa55word", "http://host#pa55word",
    ],
)  # fmt: skip
async def test_an_invalid_base_url_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        UrlBackend(url)

    assert "pa55word" not in str(refused.value)


@pytest.mark.parametrize("key", ["", "two words", "line\r\nX-Other: 1", "ключ"])
async def test_a_key_that_no_header_can_carry_is_refused_and_not_quoted(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        UrlBackend("http://host", key)

    assert key == "" or key not in str(refused.value)
