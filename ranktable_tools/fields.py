"""Checks of single values of table entries: each returns what is wrong with a string, or None."""

import re

from ranktable_tools.addresses import host_problem
from ranktable_tools.document import Check, ValueFault, shown
from ranktable_tools.ports import parse_port
from ranktable_tools.tables import WORKER_KINDS

MAX_SERVER_ID = 64
PORT_ADVICE = 'must be a port from "1" to "65535"'
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")


def address(text: str) -> ValueFault | None:
    """Require an address or host name that other hosts can reach."""
    advice = host_problem(text)
    if advice is None:
        return None
    code = "masked-address" if "*" in text else "bad-address"
    return ValueFault("listen-address" if "listen" in advice else code, advice)


def identity(text: str) -> ValueFault | None:
    """Require a server_id: any text that is not masked."""
    if "*" in text:
        return address(text)
    return None if text.strip() else ValueFault("empty-id", "must not be empty")


def short_identity(text: str) -> ValueFault | None:
    """Require a server_id that HCCL accepts: at most 64 characters."""
    if len(text) > MAX_SERVER_ID:
        return ValueFault("long-server-id", f"must have at most {MAX_SERVER_ID} characters, but has {len(text)}")
    return identity(text)


def port(text: str) -> ValueFault | None:
    """Require a port number."""
    return ValueFault("bad-port", PORT_ADVICE) if parse_port(text) is None else None


def worker_kind(text: str) -> ValueFault | None:
    """Require an engine whose workers pdserve supports."""
    kinds = " or ".join(map(shown, WORKER_KINDS))
    return None if text in WORKER_KINDS else ValueFault("worker-kind", f"must be {kinds}")


def number(text: str) -> ValueFault | None:
    """Require a whole number without a sign or leading zeros."""
    return (
        None
        if _WHOLE_NUMBER.fullmatch(text)
        else ValueFault("bad-number", 'must be a whole number as a string, like "4"')
    )


def number_up_to(limit: int) -> Check:
    """Return a check that requires a whole number from 0 to `limit`."""

    def check(text: str) -> ValueFault | None:
        fault = number(text)
        if fault is None and int(text) > limit:
            return ValueFault("number-range", f'must be from "0" to "{limit}"')
        return fault

    return check


def exactly(wanted: str, code: str, advice: str) -> Check:
    """Return a check that requires one value."""
    return lambda text: None if text == wanted else ValueFault(code, advice)


def anything(text: str) -> ValueFault | None:
    """Accept any string."""
    return None


def completed(text: str) -> ValueFault | None:
    """Require the status of a table that may be used."""
    if text == "completed":
        return None
    if text == "initializing":
        return ValueFault("not-completed", 'must be "completed": the table is not complete yet, wait for its writer')
    return ValueFault("bad-status", 'must be "completed"')
