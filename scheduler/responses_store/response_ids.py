"""Ids of stored responses: resp_, 8 hex digits that name the store, and 32 random ones."""

import re
import secrets

_ID = re.compile(r"resp_([0-9a-f]{8})[0-9a-f]{32}")


def new_store_id() -> str:
    """Return the name of a new store."""
    return secrets.token_hex(4)


def new_response_id(store_id: str) -> str:
    """Return the id of a new response of this store."""
    return f"resp_{store_id}{secrets.token_hex(16)}"


def store_of(response_id: str) -> str | None:
    """Return the store that an id names; None if no store made it."""
    found = _ID.fullmatch(response_id)
    return None if found is None else found[1]
