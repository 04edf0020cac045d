"""Wait until a cluster is ready, watching its processes meanwhile."""

import time
from collections.abc import Callable, Sequence

from pdserve.client import Client, Reply
from pdserve.processes import POLL_S, Watched
from pdserve.run_folder import ProcessRecord
from wire.errors import ConfigError, DeadlineExceeded, Unavailable

_WRONG_INPUT = 2
"""The exit status of a process of ours that cannot start as it was told to."""


def wait_ready(
    children: Sequence[Watched], client: Client, timeout_s: float, say: Callable[[str], None]
) -> None:  # fmt: skip
    """Return when /ready of their own scheduler says so, telling by `say` what it waits for.

    Raises Unavailable, with its last log line, when a process ends (ConfigError where it says that what it was told is
    wrong), and DeadlineExceeded after `timeout_s`.
    """
    say(f"starting {', '.join(child.record.name for child in children)}")
    deadline = time.monotonic() + timeout_s
    told = ""
    while True:
        for child in children:
            end = child.ended()
            if end is not None:
                raise (ConfigError if child.exit_status == _WRONG_INPUT else Unavailable)(end)
        reply = _reply(client)
        ready, words = _told(reply)
        if ready and _is_of(children, reply):
            return
        if ready:  # it took the port after we looked: our own scheduler will say so and end
            words = f"another cluster serves at {client.base_url}"
        if words not in ("", told):
            told = words
            say(f"waiting: {words}")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"not ready after {timeout_s:g} s: {told or 'the scheduler does not answer'}")
        time.sleep(POLL_S)


def ask(client: Client) -> tuple[bool, str]:
    """Return whether the cluster is ready, and what /ready says it waits for."""
    return _told(_reply(client))


def serves(client: Client, record: ProcessRecord) -> bool:
    """Return whether the cluster is ready, and this process, if it is an instance, living."""
    reply = _reply(client)
    if not _told(reply)[0]:
        return False
    return record.role == "scheduler" or _plain(record.address) in _addresses(reply, "living")


def _reply(client: Client) -> Reply | None:
    try:
        return client.get("/ready")
    except Unavailable:
        return None


def _told(reply: Reply | None) -> tuple[bool, str]:
    if reply is None:
        return False, ""
    return reply.status == 200, "" if reply.status == 200 else _words(reply.json())


def _is_of(children: Sequence[Watched], reply: Reply | None) -> bool:
    """Tell whether an instance that is named there is one of ours."""
    return not _addresses(reply).isdisjoint(_plain(child.record.address) for child in children)


def _addresses(reply: Reply | None, state: str | None = None) -> set[str]:
    """Return where the instances are that /ready lists, those in one state alone where it is given."""
    body = None if reply is None else reply.json()
    listed = body.get("instances") if isinstance(body, dict) else None
    instances = [one for one in listed or () if isinstance(one, dict) and state in (None, one.get("state"))]
    return {_plain(str(one.get("address"))) for one in instances}


def _plain(address: str) -> str:
    return address.replace("[", "").replace("]", "")


def _words(body: object) -> str:
    if not isinstance(body, dict):
        return ""
    error = body.get("error")
    if isinstance(error, dict):
        return str(error.get("message", ""))
    for key in ("waiting", "missing", "reason", "detail"):
        if body.get(key):
            value = body[key]
            return "; ".join(map(str, value)) if isinstance(value, list) else str(value)
    return ""
