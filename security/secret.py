"""The cluster secret: read from a file, named by a fingerprint; peers prove over nonces that they hold it.

    client   -- its nonce -------------------------------------------> server
             <- its nonce, HMAC(secret, server | purpose | nonces) ----
             -- HMAC(secret, client | purpose | nonces) ------------->

The secret is never sent; the role in each proof prevents reflecting a proof back. HMAC is RFC 2104 over SHA-256.
"""

import hmac
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from wire.errors import ConfigError

SECRET_VARIABLE = "PDSERVE_SECRET_FILE"  # noqa: S105 - the name of a variable
SECRET_NAME = "cluster_secret"  # noqa: S105 - a file name
MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4_096
MIN_NONCE_BYTES = 16
MAX_NONCE_BYTES = 64
PROOF_BYTES = 32
FINGERPRINT_CHARS = 8


@dataclass(frozen=True, slots=True)
class Secret:
    """A cluster secret. It is never printed; `fingerprint`, 8 hex digits of a one-way hash, identifies it."""

    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse a secret that could be guessed. Raises ConfigError."""
        if not MIN_SECRET_BYTES <= len(self.value) <= MAX_SECRET_BYTES:
            size = len(self.value) if len(self.value) < MIN_SECRET_BYTES else f"more than {MAX_SECRET_BYTES}"
            raise ConfigError(
                f"a cluster secret has {size} bytes, but must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"
            )

    @property
    def fingerprint(self) -> str:
        """Return the identifier of this secret for messages."""
        return hmac.digest(self.value, b"pdserve fingerprint", "sha256").hex()[:FINGERPRINT_CHARS]


class Side(StrEnum):
    """The side that proves: the client that dials or the server that listens. The values are part of every proof."""

    CLIENT = "opener"
    SERVER = "answerer"


@dataclass(frozen=True, slots=True)
class Prover:
    """The proofs of one handshake, bound to its purpose, both nonces and `context`, the messages exchanged so far."""

    secret: Secret
    purpose: str
    client_nonce: bytes
    server_nonce: bytes
    context: bytes = b""

    def proof(self, side: Side) -> bytes:
        """Return the 32 bytes with which `side` proves that it has the secret."""
        parts = (side.encode(), self.purpose.encode(), self.client_nonce, self.server_nonce, self.context)
        # Each part is preceded by its length, so no two handshakes sign the same message.
        message = b"".join(len(part).to_bytes(4, "big") + part for part in (b"pdserve proof 1", *parts))
        return hmac.digest(self.secret.value, message, "sha256")

    def holds(self, side: Side, proof: bytes) -> bool:
        """Return whether `proof` is that of `side`; a constant-time comparison."""
        nonces = (self.client_nonce, self.server_nonce)
        fit = all(MIN_NONCE_BYTES <= len(nonce) <= MAX_NONCE_BYTES for nonce in nonces)
        return hmac.compare_digest(self.proof(side), proof) and fit


def find_secret(environ: Mapping[str, str], table_path: str | None) -> Secret | None:
    """Return the secret of PDSERVE_SECRET_FILE, else of `cluster_secret` beside the global table, else None.

    Raises ConfigError when the named file is missing, or when a file cannot be trusted.
    """
    named = environ.get(SECRET_VARIABLE)
    if named:
        return read_secret(Path(named), SECRET_VARIABLE)
    default_path = None if table_path is None else Path(table_path).absolute().parent / SECRET_NAME
    if default_path is None or not os.path.lexists(default_path):
        return None
    return read_secret(default_path, "the cluster secret")


def read_secret(path: Path, what: str = "the cluster secret") -> Secret:
    """Read a secret file: owned by this user or root, and private. Raises ConfigError with the value and the limit."""
    try:
        # Opening a pipe at this path must not block; _check_file refuses it.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_file(os.fstat(file.fileno()), path, what)
            text = file.read(MAX_SECRET_BYTES + 2).strip()
    except OSError as error:
        raise ConfigError(f"{what}: {path} cannot be read: {error.strerror}{_owner_hint(path, error)}") from error
    try:
        return Secret(text)
    except ConfigError as error:
        raise ConfigError(f"{what}: {path}: {error}") from error


def differ(ours: Secret | None, our_host: str, theirs: str, their_host: str) -> str:
    """Describe how the secrets of two sides differ; `theirs` is a fingerprint, empty where there is none."""
    if ours is not None and theirs:
        return f"cluster secrets differ: {ours.fingerprint} here ({our_host}), {theirs} there ({their_host})"
    if ours is not None:
        return (
            f"the cluster secret {ours.fingerprint} is set here ({our_host}), but none is set there ({their_host}): "
            f"copy {SECRET_NAME} beside the global table there, or set {SECRET_VARIABLE} there to its path"
        )
    return (
        f"there is no cluster secret here ({our_host}), but {theirs or 'one'} there ({their_host}): "
        f"copy {SECRET_NAME} from there beside the global table here, or set {SECRET_VARIABLE} to its path"
    )


def readable(fingerprint: str) -> str:
    """Return a peer's fingerprint if it is well-formed, else `unreadable`; empty stays empty."""
    if not fingerprint:
        return ""
    fit = len(fingerprint) == FINGERPRINT_CHARS and set(fingerprint) <= set("0123456789abcdef")
    return fingerprint if fit else "unreadable"


def _owner_hint(path: Path, error: OSError) -> str:
    """Name owner and user of a file this process may not read; `ranktable merge --owner UID` sets another owner."""
    if not isinstance(error, PermissionError):
        return ""
    try:
        status = path.stat()
    except OSError:
        return f"; this process is uid {os.geteuid()}"
    whose = f"; it belongs to uid {status.st_uid}, and this process is uid {os.geteuid()}"
    is_own = status.st_uid == os.geteuid()
    return f"{whose} too: it has mode {stat.S_IMODE(status.st_mode):04o}, chmod 600 {path}" if is_own else whose


def _check_file(status: os.stat_result, path: Path, what: str) -> None:
    mode, own = stat.S_IMODE(status.st_mode), os.geteuid()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{what}: {path} is not a regular file")
    if mode & 0o077:
        raise ConfigError(f"{what}: {path} has mode {mode:04o}, but others must have no access: chmod 600 {path}")
    if status.st_uid not in (own, 0):
        raise ConfigError(f"{what}: {path} belongs to uid {status.st_uid}, but this process is uid {own}")
