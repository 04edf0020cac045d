"""Read the query of a presigned URL: whether it is signed, and when it expires."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote

_SIGNATURES = frozenset({"signature", "sig", "x-amz-signature", "x-goog-signature", "x-oss-signature", "q-signature"})
_PREFIXES = ("x-amz-", "x-goog-", "x-oss-")
_SENT = frozenset({"host", "content-length", "content-md5"})


def is_presigned(query: str) -> bool:
    """Return whether this raw query is a credential: signed for AWS (both versions), OBS, OSS, GCS, COS or Azure."""
    return any(name in _SIGNATURES or name.startswith(_PREFIXES) for name, _ in _pairs(query))


def is_bound_to_headers(query: str) -> bool:
    """Return whether this signature requires that no content headers are sent, as AWS signature version 2 does."""
    names = {name for name, _ in _pairs(query)}
    return bool(names & _SIGNATURES) and not names & {"x-amz-signature", "x-goog-signature"}


def missing_headers(query: str) -> list[str]:
    """Return the headers that a version 4 signature covers and that a transfer does not send."""
    values = dict(_pairs(query))
    signed = values.get("x-amz-signedheaders") or values.get("x-goog-signedheaders") or "host"
    return sorted(set(signed.lower().split(";")) - _SENT)


def expires_at(query: str) -> datetime | None:
    """Return when the signature expires, or None if the query does not have it in a known form."""
    values = dict(_pairs(query))
    try:
        if "expires" in values and "signature" in values:
            return datetime.fromtimestamp(int(values["expires"]), UTC)
        for prefix in ("x-amz-", "x-goog-"):
            if f"{prefix}date" in values:
                signed = datetime.strptime(values[f"{prefix}date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
                return signed + timedelta(seconds=int(values[f"{prefix}expires"]))
    except (ValueError, OverflowError, OSError, KeyError):
        return None
    return None


def _pairs(query: str) -> Sequence[tuple[str, str]]:
    """Return names in lower case and values, both decoded."""
    parts = (pair.partition("=") for pair in query.split("&"))
    return [(unquote(name).lower(), unquote(value)) for name, _, value in parts]
