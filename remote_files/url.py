"""The URL of a remote file: parsed once, strictly, and printed without its secrets."""

import re
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urljoin

from yarl import URL

from remote_files.presigned import expires_at, is_bound_to_headers, is_presigned, missing_headers
from remote_files.redaction import redacted, redacted_text
from wire.errors import ConfigError

_REMOTE = re.compile(r"https?:|[A-Za-z][A-Za-z0-9+.-]*:[/\\]{2}", re.IGNORECASE)
_WHOLE = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/?]+)(?P<rest>[/?].*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_MAX_CHARS = 16_384


def is_remote(name: str) -> bool:
    """Return whether `name` is a URL (of any scheme) and not a path of this machine."""
    return _REMOTE.match(name) is not None


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """An http or https URL whose text is sent unchanged; its str and repr hide possible credentials."""

    url: URL = field(repr=False)
    shown: str

    @classmethod
    def parse(cls, text: str) -> "RemoteUrl":
        """Parse `text`. Raises ConfigError, without its secrets, if parsers might disagree about its host."""
        if len(text) > _MAX_CHARS:
            raise ConfigError(f"{redacted(text)[:300]}: {len(text)} characters are above the limit of {_MAX_CHARS}")
        shown = redacted(text)
        why = _defect(text)
        if why:
            raise ConfigError(f"{shown!r}: {why}")
        try:
            found = cls(URL(text, encoded=True), shown)
            if not found.host or not found.port:
                raise ValueError
        except ValueError:
            raise ConfigError(f"{shown!r}: the host or the port cannot be read") from None
        if missing := missing_headers(found.url.raw_query_string):
            names = redacted_text(", ".join(missing), text)
            raise ConfigError(
                f"{shown!r}: signed for headers that are not sent ({names}): sign the URL for the host header only"
            )
        return found

    def __str__(self) -> str:
        return self.shown

    @property
    def host(self) -> str:
        """The host without brackets."""
        return self.url.raw_host or ""

    @property
    def port(self) -> int:
        """The port, by default the scheme's."""
        return self.url.port or 0

    @property
    def is_presigned(self) -> bool:
        """Whether the URL itself is a credential for the file."""
        return is_presigned(self.url.raw_query_string)

    @property
    def accepts_headers(self) -> bool:
        """Whether content headers may be sent; a signature of version 2 forbids them."""
        return not is_bound_to_headers(self.url.raw_query_string)

    @property
    def expires_at(self) -> datetime | None:
        """When a presigned URL expires, None if unknown."""
        return expires_at(self.url.raw_query_string)

    def target(self, location: str) -> "RemoteUrl":
        """Return the target of a redirect. Raises ConfigError if it may not be followed."""
        if not location:
            raise ConfigError(f"{self} redirects without a Location header")
        if why := _unreadable(location):
            raise ConfigError(f"{self} redirects to {redacted(location)!r}: {why}")
        try:
            found = RemoteUrl.parse(urljoin(str(self.url), location))
        except ValueError:
            raise ConfigError(f"{self} redirects to {redacted(location)!r}, which is not a valid URL") from None
        if self.url.scheme == "https" and found.url.scheme != "https":
            raise ConfigError(f"{self} redirects to {found}: redirects from https to http are not followed")
        return found


def _unreadable(text: str) -> str | None:
    """Return the problem with the characters of `text`: only those that all URL parsers treat alike are allowed."""
    if not all("!" <= char <= "~" for char in text):
        return "a URL has only visible ASCII characters: write others as %XX, and a host in its xn-- form"
    return "a URL of a file has no backslash and no fragment (#)" if "\\" in text or "#" in text else None


def _defect(text: str) -> str | None:
    """Return the problem with the form of `text`, if any."""
    if found := _unreadable(text):
        return found
    parts = _WHOLE.fullmatch(text)
    if parts is None:
        return "a URL of a file begins with http:// or https:// and a host; for a bucket, make a presigned URL"
    if "@" in parts["authority"]:
        return "a URL of a file must not contain a user or password"
    authority = _AUTHORITY.fullmatch(parts["authority"])
    return _host_defect(authority["host"]) if authority else "the host or the port cannot be read"


def _host_defect(host: str) -> str | None:
    try:
        if host.startswith("["):
            IPv6Address(host[1:-1])
        elif _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
            IPv4Address(host)
    except ValueError:
        return "an IP address must be in its full form, such as 192.0.2.1 or [2001:db8::1]"
    return None if host.strip(".") and ".." not in host else "the host cannot be read"
