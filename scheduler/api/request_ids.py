"""Ids of requests: pdserve's are random; a client's are echoed, logged and shown, but not used internally."""

import os
import re
import time

from starlette.requests import Request

from scheduler.http.header import header_of

_MAX_CLIENT_ID = 128
_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")


def new_id(kind: str) -> str:
    """Return a new id, such as chatcmpl-<32 hex digits>."""
    return f"{kind}-{os.urandom(16).hex()}"


def shown_id(own_id: str, request: Request, body_id: str | None = None) -> str:
    """Return the answer's `id`: `own_id`, or its prefix followed by the X-Request-Id, else by the body's id.

    A client id shown by another running request is not used; the gate releases it when that request ends.
    """
    client_id = clean_client_id(header_of(request.scope, b"x-request-id") or "") or clean_client_id(body_id or "")
    state = request.scope["state"]
    if client_id is None or client_id in state["ids_in_use"]:
        return own_id
    state["ids_in_use"].add(client_id)
    state["client_id"] = client_id
    return f"{own_id.rpartition('-')[0]}-{client_id}"


def created_at(request: Request) -> int:
    """Return when the answer was created, in seconds since 1970: now, unless it is a stream that is resumed."""
    created: int | None = request.scope["state"].get("created")
    return int(time.time()) if created is None else created


def clean_client_id(given: str) -> str | None:
    """Return the part of a client's X-Request-Id that is safe to echo and log, None if nothing is left."""
    return _UNSAFE.sub("", given[:_MAX_CLIENT_ID]) or None
