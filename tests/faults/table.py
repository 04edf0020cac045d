"""Render docs/faults.md from the matrix's measurements: `python -m tests.faults.table RESULTS.json >docs/faults.md`."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from processes.failpoints import POINTS
from tests.faults.cases import ANSWER, CASES, CLOSED, ERROR, LONG_TOKENS, MAX_TOKENS, Case
from tests.faults.cluster import PROMPT_TOKENS
from tests.faults.launch import LEASE_S, SILENCE_S
from tests.faults.running import NUM_STREAMS, Measured

_ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \|", re.MULTILINE)
_WORDS = {ANSWER: "the fault-free answer", ERROR: "an error event", CLOSED: "its connection closes"}


def rows_of(page: str) -> list[str]:
    """Return the cases that a page has rows for, as `point=action`, in its order."""
    return [f"{place}={action}" for place, action in _ROW.findall(page)]


def render(measured: Sequence[Measured]) -> str:
    """Return the page. Raises ValueError unless every case of the code was measured once."""
    by_name = {f"{one.place}={one.action}": one for one in measured}
    missing = [str(case) for case in CASES if str(case) not in by_name]
    if missing or len(by_name) != len(measured) or len(measured) != len(CASES):
        raise ValueError(f"{len(measured)} results for {len(CASES)} cases; missing: {', '.join(missing) or 'none'}")
    return "\n".join([*_header(), *_points(), "", *_table(by_name), ""])


def _header() -> Iterable[str]:
    return f"""\
# Injected faults, and what the client sees

<!-- Made by scripts/faults, which runs tests/faults/test_matrix.py; do not edit. -->

Each row is one run: a scheduler, two prefill (P) and two decode (D) instances as processes with the fake engine, and
{NUM_STREAMS} streams of {PROMPT_TOKENS} prompt tokens at once ({MAX_TOKENS} tokens each; {LONG_TOKENS} where the
scheduler is killed or stopped). One process is started with `PDSERVE_FAILPOINTS=point=action`: it acts at every
pass; with `point=action@N` (in the table `point@N`) only at the N-th, with `point=action*N` at the first N. The fake
engine's tokens are checksums of the KV they were computed from, so an answer also proves that the KV arrived intact.

What each row asserts:

- after a fault of an instance the client gets the fault-free answer, whether the fault comes before the first token or
  after it: another pair continues after the tokens already sent; no stream stops without an error, nothing follows one;
- killing the scheduler closes its connections; stopping it leads, after it resumes, to the answer or an error event;
- every living, unstopped instance holds no KV block within lease + 1 s of the fault (of time in which it could run), a
  stopped one 1 s after it resumes;
- each request ends once in the scheduler's counts, in the way its client saw;
- messages that a stopped process sends after it resumes are dropped: no admission, no token, no second finish of its
  old work, and the next request over it is answered in full.

With only one P and one D (tests/faults/test_losses.py) the client gets an error with a message, before the first token.
Processes that are slow but not gone, and one that is gone while another is slow: tests/faults/test_slow.py, with the
limits of silence in service. Two schedulers on the same instances, of which one is killed or stopped past its lease, or
both race for a small pool: tests/faults/test_several_schedulers.py.

Its clients send a request that is not streamed again after its scheduler died. 8 such requests at one of two
schedulers, which is killed while they are decoded; repeated at the other (in the same file):

| repeated | answers | ran twice |
|---|---|---|
| without a header | 8 | 8 |
| with its `Idempotency-Key` ([streams.md](streams.md#requests-that-run-once)) | 8 | 0 |

The limits are the test's, not those in service: lease {LEASE_S:g} s (10 s in service), a frozen process is given up
after {SILENCE_S:g} s of silence (6 s in service). So the milliseconds show which limit was waited for, not the speed
of a machine: they are from one run, and those over 2,000 are the limit of silence or the lease.

## The failpoints
""".splitlines()


def _points() -> Iterable[str]:
    yield "| failpoint | at this moment | `corrupt` changes |"
    yield "|---|---|---|"
    for name, point in POINTS.items():
        yield f"| `{name}` | {point.who} {point.when} | {point.corrupts or '(refused)'} |"


def _table(by_name: dict[str, Measured]) -> Iterable[str]:
    yield "## The faults"
    yield ""
    yield (
        f"| at | action | process | what {NUM_STREAMS} clients see | last request ended, ms after the fault | "
        "other pools empty, ms after the fault | own pool empty, ms after resuming |"
    )
    yield "|---|---|---|---|---|---|---|"
    for case in CASES:
        one = by_name[str(case)]
        yield (
            f"| `{case.place}` | {case.action} | {one.victim} | {_outcome(one)} | {one.ended_ms:.0f} "
            f"| {one.pools_ms:.0f} | {_woken_cell(case, one)} |"
        )


def _outcome(one: Measured) -> str:
    parts = [f"{_WORDS[ending]} ({count})" for ending, count in one.endings.items()]
    return ", ".join(parts) + (f": “{_plain_text(one.message)}”" if one.message else "")


def _plain_text(message: str) -> str:
    return re.sub(r"\breq-\w+", "…", message).replace("|", "/")


def _woken_cell(case: Case, one: Measured) -> str:
    return "" if one.woken_ms is None or case.victim == "scheduler" else f"{one.woken_ms:.0f}"


def main(argv: Sequence[str]) -> int:
    """Print the page for the named file of results."""
    print(render([Measured(**one) for one in json.loads(Path(argv[0]).read_text())]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
