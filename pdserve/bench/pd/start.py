"""Start a contestant's processes, wait until they are ready, and stop them all afterwards."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pdserve.bench.pd.contestants import ServerContestant
from pdserve.client import Client
from pdserve.processes import POLL_S, Child, send_signal, stop, wait
from pdserve.readiness import check_ready
from pdserve.run_folder import ProcessRecord
from wire.errors import DeadlineExceeded, Unavailable

_GRACE_S, _PEER_GRACE_S = 10.0, 60.0  # a killed vLLM leaves its shared memory behind


@contextlib.contextmanager
def started(contestant: ServerContestant, folder: Path, timeout_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Run the contestant's processes, which must be ready within `timeout_s`; their logs are in `folder`.

    Raises Unavailable when one ends, DeadlineExceeded when one is not ready in time, both with the log paths.
    """
    children: list[Child] = []
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or contestant.is_ours}
    try:
        for plan in contestant.plans:
            children.append(Child(plan, folder / f"{plan.name}.log", environ))  # for _stop, even if the next one fails
        say(f"{contestant.name}: starting {', '.join(plan.name for plan in contestant.plans)}")
        began_s = time.monotonic()
        _wait(contestant, children, timeout_s)
        say(f"{contestant.name}: ready after {time.monotonic() - began_s:.0f} s")
        yield
    finally:
        for process in _stop(children, contestant):
            say(f"{process.name} did not stop in time and was killed (log: {process.log})")
        for child in children:
            child.ended()  # reaps it
        children.clear()  # closes the pipes: a guard (keeper.py) kills the rest of a group


def _stop(children: Sequence[Child], contestant: ServerContestant) -> Sequence[ProcessRecord]:
    records = [child.record for child in children]
    if contestant.is_ours:
        return stop(records, _GRACE_S)
    for record in records:
        send_signal(record, signal.SIGTERM)
    wait(records, _PEER_GRACE_S)
    return stop(records)


def _wait(contestant: ServerContestant, children: Sequence[Child], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = [Client(url) for url in contestant.urls]
    reason = ""
    while waiting:
        for child in children:
            end = child.ended()
            if end is not None:
                raise Unavailable(end)
        answered, reason = _check_answers(waiting[0], contestant)
        if answered:
            del waiting[0]
            continue
        if time.monotonic() > deadline:
            logs = ", ".join(child.record.log for child in children)
            silent = reason or "it does not answer"
            raise DeadlineExceeded(f"{contestant.name} is not ready after {timeout_s:g} s: {silent} (logs: {logs})")
        time.sleep(POLL_S)


def _check_answers(client: Client, contestant: ServerContestant) -> tuple[bool, str]:
    if contestant.is_ours:
        return check_ready(client)
    try:
        return client.get(contestant.ready_path).status == 200, ""
    except Unavailable as error:
        return False, str(error)
