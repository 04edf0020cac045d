"""Ids of requests: ours are random; the client's are echoed, logged and shown, and mean nothing inside."""

import re
import secrets

from starlette.requests import Request

_MAX_CLIENT_ID = 128


def new_id(kind: str) -> str:
    """Return a new id, as chatcmpl-<32 hex digits>."""
    return f"{kind}-{secrets.token_hex(16)}"


def shown_id(own_id: str, request: Request, body_id: str | None = None) -> str:
    """Return the `id` of an answer: ours, or of its kind with the X-Request-Id, else the body's id, behind it.

    An id that a request under way shows already is not shown again: the gate forgets it with that request.
    """
    client_id = clean_client_id(request.headers.get("x-request-id", "")) or clean_client_id(body_id or "")
    state = request.scope["state"]
    if client_id is None or client_id in state["ids_in_use"]:
        return own_id
    state["ids_in_use"].add(client_id)
    state["client_id"] = client_id
    return f"{own_id.partition('-')[0]}-{client_id}"


def clean_client_id(given: str) -> str | None:
    """Return what may be echoed and logged of a client's X-Request-Id, None if nothing is left."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", given[:_MAX_CLIENT_ID]) or None
