"""Certificates for tests, made by the openssl command: an authority and what it signed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from security.tls import TlsFiles
from tests.conftest import MISSING

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


class Authority:
    """A certificate authority in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip(f"{MISSING}: openssl")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.cert, self._key = folder, folder / "ca.pem", folder / "ca.key"
        _openssl("req", "-x509", *_KEY, "-subj", "/CN=test", "-keyout", str(self._key), "-out", str(self.cert))

    def sign(self, name: str, host: str = "127.0.0.1") -> TlsFiles:
        """Return the files of a process that is reached at `host`."""
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        _openssl(
            "req", "-x509", *_KEY, "-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{host}",
            "-addext", "basicConstraints=critical,CA:FALSE", "-CA", str(self.cert), "-CAkey", str(self._key),
            "-keyout", str(key), "-out", str(cert),
        )  # fmt: skip
        return TlsFiles(str(cert), str(key), str(self.cert))


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
