"""Mutual TLS for gRPC from three PEM files: both sides present and require a certificate signed by the same CA."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from wire.errors import ConfigError

_MAX_PEM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of this process's certificate and key, and of the CA certificate that signed every peer's certificate."""

    cert: str
    key: str
    ca: str

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the server's credentials; clients need a certificate signed by `ca`. Raises ConfigError."""
        cert, key, ca = self._read()
        return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the client's credentials; the server's certificate must name the dialled host. Raises ConfigError."""
        cert, key, ca = self._read()
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        cert, key, ca = (
            _read_pem(flag, path)
            for flag, path in (("--tls-cert", self.cert), ("--tls-key", self.key), ("--tls-ca", self.ca))
        )
        return cert, key, ca


def tls_files(cert: str | None, key: str | None, ca: str | None) -> TlsFiles | None:
    """Return the files named by the three flags, None if none is set. Raises ConfigError when only some are."""
    given = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": ca}
    missing = [flag for flag, path in given.items() if not path]
    if not (cert and key and ca):
        if len(missing) < len(given):
            raise ConfigError(f"mutual TLS needs --tls-cert, --tls-key and --tls-ca; missing: {', '.join(missing)}")
        return None
    files = TlsFiles(cert, key, ca)
    files._read()
    _check_pair(files)
    return files


def _check_pair(files: TlsFiles) -> None:
    """Check that key and certificate match: gRPC would only report that it cannot bind the port."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.cert, files.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tls-key {files.key} is not an unencrypted key of the certificate --tls-cert {files.cert}: {error}"
        ) from error


def _read_pem(flag: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_PEM_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    if len(text) > _MAX_PEM_BYTES or b"-----BEGIN " not in text:
        raise ConfigError(f"{flag} {path} is not a PEM file of at most {_MAX_PEM_BYTES} bytes")
    return text
