"""The checks of the self-test, run one after another, and their results."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

LOST_PEER = "lost peer"
GROUPS = (
    "attention", "sampler", "memory", "graphs", "network", "experts", "linear layers", "links", LOST_PEER, "model",
)  # fmt: skip
"""The groups of checks, in the order in which they run."""


class NotHere(Exception):
    """A check that does not apply to this machine or device, with the reason; not a failure."""


class CheckStatus(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    FAILED = "FAILED"
    NOT_HERE = "not here"


@dataclass(frozen=True, slots=True)
class SelftestCheck:
    """One row. `run` returns a remark, raises NotHere, or fails with Wrong or any other exception."""

    group: str
    name: str
    run: Callable[[], str]


class Wrong(Exception):
    """An op, a link or a model gave a wrong result; the message describes it."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check; `words` is a one-line message."""

    group: str
    name: str
    verdict: CheckStatus
    words: str
    seconds: float


def run_all(checks: Iterable[SelftestCheck]) -> Iterator[Result]:
    """Run each check and yield its result at once; a failure does not stop the others."""
    for check in checks:
        began = time.monotonic()
        verdict, words = _run(check)
        yield Result(check.group, check.name, verdict, " ".join(words.split()), time.monotonic() - began)


def _run(check: SelftestCheck) -> tuple[CheckStatus, str]:
    try:
        return CheckStatus.OK, check.run()
    except NotHere as why:
        return CheckStatus.NOT_HERE, str(why)
    except Wrong as error:
        return CheckStatus.FAILED, str(error)
    except Exception as error:  # noqa: BLE001 - a check's outermost frame: driver libraries raise any exception
        return CheckStatus.FAILED, f"{type(error).__name__}: {error}"
