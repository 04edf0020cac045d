"""What the self-test consists of: checks that are run one after another, and how each went."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

GROUPS = (
    "attention", "sampler", "memory", "graphs", "network", "experts", "linear layers", "links", "model",
)  # fmt: skip
"""In the order in which they are run."""


class NotHere(Exception):
    """A check that this machine or device cannot be put to, and why: no failure."""


class CheckStatus(StrEnum):
    """How a check went."""

    OK = "ok"
    FAILED = "FAILED"
    NOT_HERE = "not here"


@dataclass(frozen=True, slots=True)
class SelftestCheck:
    """One row. `run` returns what is worth saying of it, raises Wrong or anything else where it fails, or NotHere."""

    group: str
    name: str
    run: Callable[[], str]


class Wrong(Exception):
    """The result of an op, a link or a model is not what it should be, in words."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one check went; `words` are one line."""

    group: str
    name: str
    verdict: CheckStatus
    words: str
    seconds: float


def run_all(checks: Iterable[SelftestCheck]) -> Iterator[Result]:
    """Run each check and yield its result as it is there; a failure ends none of the others."""
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
    except Exception as error:  # noqa: BLE001 - a check's outermost frame: a driver's library raises what it likes
        return CheckStatus.FAILED, f"{type(error).__name__}: {error}"
