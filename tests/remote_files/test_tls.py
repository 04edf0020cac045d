"""Files over https: by default with certificates that the machine trusts, or with those in SSL_CERT_FILE."""

import asyncio
import datetime
import ipaddress
import os
import ssl
import sys
from pathlib import Path

import pytest

from tests.conftest import MISSING
from tests.remote_files.raw_server import in_turn, ok, raw_server

pytestmark = [pytest.mark.anyio, pytest.mark.long]

ROOT = Path(__file__).parents[3]
# The library reads the trusted certificates at import: so each case has its own process.
CHILD = """
import asyncio, sys
from pathlib import Path
from remote_files.addresses import AddressRules
from remote_files.download import download
from wire.errors import PdserveError

try:
    print(asyncio.run(download(sys.argv[1], Path(sys.argv[2]), rules=AddressRules.of(["127.0.0.1"]))))
except PdserveError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The server's loop; the downloads have one of their own."""
    return "asyncio"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a self-signed certificate for 127.0.0.1 with its key."""
    x509 = pytest.importorskip("cryptography.x509", reason=f"{MISSING}: cryptography, of the extra `clients`")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    path.write_bytes(private + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path


async def _fetched(certificate: Path, to: Path, host: str = "127.0.0.1", **environ: str) -> tuple[str, int]:
    """Return what a download in another process prints, and how many requests came."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    async with raw_server(in_turn(ok(b"hello")), tls) as server:
        url = server.url("/in?Signature=SECRET&Expires=1", host).replace("http:", "https:")
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, url, str(to), cwd=ROOT, stdout=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], **environ},
        )  # fmt: skip
        out, _ = await child.communicate()
        assert child.returncode == 0
        return out.decode().strip(), len(server.requests)


async def test_an_untrusted_certificate_is_refused_at_once(certificate: Path, tmp_path: Path) -> None:
    printed, num_asked = await _fetched(certificate, tmp_path / "in")

    assert printed.startswith("ConfigError https://127.0.0.1:")
    assert printed.endswith("/in?(hidden): the certificate of 127.0.0.1 is not trusted: self-signed certificate")
    assert num_asked == 0


async def test_a_certificate_of_another_host_is_refused(certificate: Path, tmp_path: Path) -> None:
    printed, num_asked = await _fetched(certificate, tmp_path / "in", "localhost", SSL_CERT_FILE=str(certificate))

    assert "the certificate of localhost is not trusted: Hostname mismatch" in printed
    assert num_asked == 0


@pytest.mark.covers("A1.15")
async def test_a_certificate_named_by_the_environment_is_trusted(certificate: Path, tmp_path: Path) -> None:
    assert await _fetched(certificate, tmp_path / "in", SSL_CERT_FILE=str(certificate)) == ("5", 1)
