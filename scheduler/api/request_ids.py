"""Ids of requests: ours are random, the client's are only echoed and logged."""

import re
import secrets

_MAX_CLIENT_ID = 128


def new_id(kind: str) -> str:
    """Return a new id, as chatcmpl-<32 hex digits>."""
    return f"{kind}-{secrets.token_hex(16)}"


def clean_client_id(given: str) -> str | None:
    """Return what may be echoed and logged of a client's X-Request-Id, None if nothing is left."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", given[:_MAX_CLIENT_ID]) or None
