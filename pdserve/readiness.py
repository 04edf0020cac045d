"""Wait until a cluster is ready, watching its processes meanwhile."""

import time
from collections.abc import Callable, Collection, Sequence

from pdserve.client import Client, Reply
from pdserve.processes import POLL_S, Watched
from pdserve.run_folder import ProcessRecord
from telemetry.start_marks import GRAPHS
from wire.errors import ConfigError, DeadlineExceeded, Unavailable

_WRONG_INPUT = 2
"""The exit status of a pdserve process that refuses its input."""


def wait_ready(
    children: Sequence[Watched], clients: Sequence[Client], timeout_s: float, say: Callable[[str], None],
    running: Collection[str] = (),
) -> None:  # fmt: skip
    """Return when every scheduler of the cluster, one for each of `clients`, reports ready.

    Until then, `say` prints what is missing.

    `running` are the URLs of the cluster's workers that are not among the processes.

    Raises Unavailable with the last log line of a process that ends (ConfigError if its status means wrong
    input), and DeadlineExceeded after `timeout_s`.
    """
    say(f"starting {', '.join(child.record.name for child in children)}")
    deadline = time.monotonic() + timeout_s
    last, capturing = "", set[str]()
    own = {_without_brackets(address) for address in (*running, *(child.record.address for child in children))}
    while True:
        for child in children:
            end, name = child.ended(), child.record.name
            if end is not None:
                raise (ConfigError if child.exit_status == _WRONG_INPUT else Unavailable)(end)
            if GRAPHS in child.marks and name not in capturing:
                capturing.add(name)
                say(f"{name} is capturing the graphs of its decode steps")
        missing = next((why for client in clients if (why := _why_not_ready(client, own)) is not None), None)
        if missing is None:
            return
        if missing not in ("", last):
            last = missing
            say(f"waiting: {missing}")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"not ready after {timeout_s:g} s: {last or 'the scheduler does not answer'}")
        time.sleep(POLL_S)


def _why_not_ready(client: Client, own: Collection[str]) -> str | None:
    """Return what a scheduler lacks, None if it is ready and has one of these instances."""
    reply = _reply(client)
    ready, missing = _parse_readiness(reply)
    if not ready:
        return missing
    if _addresses(reply).isdisjoint(own):  # it took the port after our check: our scheduler will report that and exit
        return f"another cluster serves at {client.base_url}"
    return None


def check_ready(client: Client) -> tuple[bool, str]:
    """Return whether the cluster is ready, and what /ready reports as missing."""
    return _parse_readiness(_reply(client))


def serves(client: Client, record: ProcessRecord) -> bool:
    """Return whether the cluster is ready, with this process living if it is an instance."""
    reply = _reply(client)
    if not _parse_readiness(reply)[0]:
        return False
    return record.role == "scheduler" or _without_brackets(record.address) in _addresses(reply, "living")


def _reply(client: Client) -> Reply | None:
    try:
        return client.get("/ready")
    except Unavailable:
        return None


def _parse_readiness(reply: Reply | None) -> tuple[bool, str]:
    if reply is None:
        return False, ""
    return reply.status == 200, "" if reply.status == 200 else _missing_reason(reply.json())


def _addresses(reply: Reply | None, state: str | None = None) -> set[str]:
    """Return the addresses of the instances that /ready lists, only those in `state` if given."""
    body = None if reply is None else reply.json()
    listed = body.get("instances") if isinstance(body, dict) else None
    instances = [one for one in listed or () if isinstance(one, dict) and state in (None, one.get("state"))]
    return {_without_brackets(str(one.get("address"))) for one in instances}


def _without_brackets(address: str) -> str:
    return address.replace("[", "").replace("]", "")


def _missing_reason(body: object) -> str:
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
