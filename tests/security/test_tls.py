"""Mutual TLS on gRPC: both sides need a certificate of the same authority."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from security.tls import TlsFiles, tls_files
from security.trust import Trust
from tests.security.certificates import Authority
from tests.security.test_grpc_proof import DEADLINE_S, DESCRIPTION, HELLO, SECRET, connect, serving
from wire.errors import ConfigError, DeadlineExceeded, InstanceLost, PdserveError


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def describe(there: TlsFiles | None, here: TlsFiles | None) -> object:
    """Return what a describe gives, or its error."""

    async def run() -> object:
        async with serving(Trust(SECRET, tls=there)) as address, connect(address, Trust(SECRET, tls=here)) as caller:
            try:
                description = await caller.describe(2.0)
                session = await caller.open(HELLO, DEADLINE_S)
                await session.close()
                return description
            except PdserveError as error:
                return error

    return asyncio.run(run())


def test_two_certificates_of_one_authority_connect(authority: Authority) -> None:
    assert describe(authority.sign("instance"), authority.sign("scheduler")) == DESCRIPTION


def test_a_caller_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path).sign("scheduler")
    trusting = TlsFiles(other.cert, other.key, str(authority.cert))

    assert isinstance(describe(authority.sign("instance"), trusting), InstanceLost | DeadlineExceeded)


def test_an_instance_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path).sign("instance")
    trusting = TlsFiles(other.cert, other.key, str(authority.cert))

    assert isinstance(describe(trusting, authority.sign("scheduler")), InstanceLost | DeadlineExceeded)


def test_an_instance_with_another_hosts_certificate_is_refused(authority: Authority) -> None:
    elsewhere = authority.sign("elsewhere", host="192.0.2.1")

    assert isinstance(describe(elsewhere, authority.sign("scheduler")), InstanceLost | DeadlineExceeded)


def test_plain_grpc_and_tls_do_not_connect(authority: Authority) -> None:
    files = authority.sign("one")

    assert isinstance(describe(files, None), InstanceLost | DeadlineExceeded)
    assert isinstance(describe(None, files), InstanceLost | DeadlineExceeded)


def test_even_the_health_service_requires_a_certificate(authority: Authority) -> None:
    async def run() -> None:
        async with serving(Trust(SECRET, tls=authority.sign("instance"))) as address:
            root = grpc.ssl_channel_credentials(authority.cert.read_bytes())
            async with grpc.aio.secure_channel(address, root) as channel:
                health: Any = health_pb2_grpc.HealthStub(channel)
                with pytest.raises(grpc.aio.AioRpcError):
                    await health.Check(health_pb2.HealthCheckRequest(), timeout=2.0)

    asyncio.run(run())


def test_missing_tls_flags_are_named() -> None:
    assert tls_files(None, None, None) is None
    with pytest.raises(ConfigError, match=r"^mutual TLS needs --tls-cert, .*; missing: --tls-key, --tls-ca$"):
        tls_files("cert.pem", None, None)


@pytest.mark.parametrize("flag", ["cert", "key", "ca"])
def test_a_missing_or_invalid_pem_file_is_named_with_its_flag(flag: str, authority: Authority, tmp_path: Path) -> None:
    files = authority.sign("process")
    paths = {"cert": files.cert, "key": files.key, "ca": files.ca}
    (tmp_path / "text").write_text("no certificate")

    with pytest.raises(ConfigError, match=rf"--tls-{flag} .*/gone cannot be read: No such file"):
        tls_files(**paths | {flag: str(tmp_path / "gone")})
    with pytest.raises(ConfigError, match=rf"--tls-{flag} .*/text is not a PEM file of at most 1048576 bytes"):
        tls_files(**paths | {flag: str(tmp_path / "text")})


def test_a_key_of_another_certificate_is_named_with_both_flags(authority: Authority) -> None:
    one, other = authority.sign("one"), authority.sign("other")

    assert tls_files(one.cert, one.key, one.ca) == one
    with pytest.raises(ConfigError, match=r"--tls-key .*other\.key is not an unencrypted key .*--tls-cert .*one\.pem"):
        tls_files(one.cert, other.key, one.ca)
