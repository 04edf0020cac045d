"""API keys: checked against the path as received, before anything else of a request is read."""

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from scheduler.config import SchedulerOptions
from wire.errors import ConfigError

OPEN_PATHS = frozenset(("/health", "/ready", "/ping", "/metrics"))
VARIABLES = ("PDSERVE_API_KEY", "VLLM_API_KEY")
MAX_KEYS = 1024
_MAX_FILE_BYTES = 2**20
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_BEARER, _API_KEY = b"authorization", b"x-api-key"
Headers = Sequence[tuple[bytes, bytes]]


class Keys:
    """The valid API keys; without any the server is open. Stores only digests, never a key."""

    def __init__(
        self, keys: Iterable[str] = (), *, classes: Mapping[str, Sequence[str]] = MappingProxyType({}),
        protect_metrics: bool = False,
    ) -> None:  # fmt: skip
        """`classes` are the classes of requests that each key may send, the default first."""
        self._tenants = {_digest(key.encode()): _tenant_name(key) for key in keys}
        self._classes = {_tenant_name(key): tuple(names) for key, names in classes.items()}
        self._open_paths = OPEN_PATHS - {"/metrics"} if protect_metrics else OPEN_PATHS

    def __len__(self) -> int:
        """Return the number of different keys."""
        return len(self._tenants)

    def classes_of(self, tenant: str) -> tuple[str, ...]:
        """Return the classes of requests that a key's owner may send, the default first."""
        return self._classes.get(tenant, ())

    def admit(self, path: str, headers: Headers) -> str | None:
        """Return the tenant of a request, "" if no key is required, None if the request must be refused.

        Applies to all methods and to all paths except exact matches of the open ones. All keys are compared, each in
        constant time, so that timing reveals nothing about them.
        """
        if not self._tenants or path in self._open_paths:
            return ""
        given, tenant = _digest(_presented_key(headers)), None
        for digest, owner in self._tenants.items():
            if hmac.compare_digest(digest, given):
                tenant = owner
        return tenant


def read_keys(options: SchedulerOptions, environ: Mapping[str, str]) -> Keys:
    """Return the keys of --api-key and --api-key-file, else those of the first variable that is set.

    A file and a variable have one key per line, optionally followed by the classes that the key may use. Raises
    ConfigError for an invalid line without repeating it.
    """
    keys = list(options.api_key)
    where = "--api-key"
    if options.api_key_file is not None:
        where = f"--api-key-file {options.api_key_file}"
        keys += _lines(_read(Path(options.api_key_file)))
        if not keys:
            raise ConfigError(f"{where} has no key: write one per line")
    if not keys:
        where = next((name for name in VARIABLES if environ.get(name)), "")
        keys = _lines(environ[where]) if where else []
    classes = _checked(keys, where, options.classes())
    return Keys(classes, classes=classes, protect_metrics=options.protect_metrics)


def _checked(lines: Sequence[str], where: str, known: Collection[str]) -> dict[str, list[str]]:
    """Return the keys of the lines with the classes that they may use."""
    if len(lines) > MAX_KEYS:
        raise ConfigError(f"{where} has {len(lines)} keys, but the limit is {MAX_KEYS}")
    classes = dict[str, list[str]]()
    for line in lines:
        key, _, names = line.partition(" ") if known else (line, "", "")
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{where}: a key of {len(key)} characters is invalid: use 1 to 512 visible ASCII characters, no spaces"
            )
        classes[key] = [name.strip() for name in names.split(",")] if names else []
        if not set(classes[key]) <= set(known):
            raise ConfigError(f"{where}: a key of {len(key)} characters has a class that is not in --request-classes")
    return classes


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path} is larger than {_MAX_FILE_BYTES} bytes")
    return content.decode(errors="replace")


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if line]


def _presented_key(headers: Headers) -> bytes:
    """Return the key in a request's only Authorization header with the scheme Bearer, else b"".

    Without an Authorization header it is the value of the only X-Api-Key header, which Anthropic's clients use.
    """
    bearers, keys = ([value for name, value in headers if name == wanted] for wanted in (_BEARER, _API_KEY))
    if not bearers:
        return keys[0].strip() if len(keys) == 1 else b""
    scheme, _, key = bearers[0].strip().partition(b" ") if len(bearers) == 1 else (b"", b"", b"")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _tenant_name(key: str) -> str:
    """Return the stable name of a key's owner, from which the key cannot be derived."""
    return "key-" + hmac.new(key.encode(), b"pdserve tenant", hashlib.sha256).hexdigest()[:16]
