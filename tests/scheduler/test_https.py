"""HTTPS: the app served with a certificate, and invalid files."""

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from scheduler.app import build_app
from scheduler.config import SchedulerOptions
from scheduler.http.certificate import read_https
from scheduler.http.listener import listen
from scheduler.http.server import serve as serve_app
from security.tls import TlsFiles
from tests.scheduler.conftest import Serve
from tests.security.certificates import Authority
from wire.errors import ConfigError

pytestmark = pytest.mark.anyio
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A server's certificate and its authority."""
    return Authority(tmp_path_factory.mktemp("https")).sign("front")


@pytest.mark.covers("B.headers.4")
async def test_with_a_certificate_the_app_is_served_by_https_alone(serve: Serve, files: TlsFiles) -> None:
    https = read_https(SchedulerOptions(ssl_keyfile=files.key, ssl_certfile=files.cert))
    async with serve() as served:
        bound, stop = listen("127.0.0.1", 0), asyncio.Event()
        port = bound.getsockname()[1]
        app = build_app(served.context)
        task = asyncio.create_task(
            serve_app(app, bound, served.context.drain, shutdown_timeout_s=1.0, stop=stop, https=https)
        )
        trusted = ssl.create_default_context(cafile=files.ca)
        async with httpx.AsyncClient(verify=trusted, trust_env=False) as client:
            answer = await client.get(f"https://127.0.0.1:{port}/v1/models")
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http://127.0.0.1:{port}/v1/models")
        stop.set()
        await asyncio.wait_for(task, DEADLINE_S)

    assert answer.status_code == 200


def test_without_files_it_is_http() -> None:
    assert read_https(SchedulerOptions()) is None


def test_incomplete_tls_flags_are_refused(files: TlsFiles) -> None:
    for options, words in (
        (SchedulerOptions(ssl_keyfile=files.key), "--ssl-keyfile is set, but HTTPS needs both"),
        (SchedulerOptions(ssl_certfile=files.cert), "--ssl-certfile is set, but HTTPS needs both"),
        (SchedulerOptions(ssl_ca_certs=files.ca), "--ssl-ca-certs is set, but HTTPS needs both"),
        (SchedulerOptions(ssl_cert_reqs="2"), "--ssl-cert-reqs 2 needs"),
        (SchedulerOptions(ssl_keyfile=files.key, ssl_certfile=files.cert, ssl_cert_reqs="2"), "needs --ssl-ca-certs"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_https(options)


def test_files_that_do_not_match_are_named(files: TlsFiles, tmp_path: Path) -> None:
    other = Authority(tmp_path).sign("other")

    with pytest.raises(ConfigError, match=r"--ssl-certfile .*front.pem with --ssl-keyfile .*other.key cannot be used"):
        read_https(SchedulerOptions(ssl_keyfile=other.key, ssl_certfile=files.cert))
    with pytest.raises(ConfigError, match=r"--ssl-ca-certs .*none cannot be used"):
        read_https(
            SchedulerOptions(ssl_keyfile=files.key, ssl_certfile=files.cert, ssl_ca_certs=str(tmp_path / "none"))
        )
