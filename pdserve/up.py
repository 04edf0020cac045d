"""`pdserve up`: start a cluster on this machine, wait until it is ready, then stay in front or leave it serving."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from pdserve.client import Client
from pdserve.layout import ClusterShape, lay_out
from pdserve.ports import require_free
from pdserve.processes import POLL_S, SCHEDULER_GRACE_S, Child, stop
from pdserve.readiness import wait_ready
from pdserve.run_folder import ClusterState, RunFolder, default_run_dir
from pdserve.up_request import UpRequest, parse
from wire.errors import ConfigError, Unavailable

_FAILED_GRACE_S = 3.0


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ConfigError for what the user must mend and Unavailable when a process dies."""
    request = parse(argv)
    folder = RunFolder(Path(request.options.run_dir or default_run_dir(os.environ)).absolute())
    interrupts = _Interrupts()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupts)
    with folder.lock():
        return _run(request, folder, interrupts)


class _Interrupts:
    """Ctrl-C and SIGTERM: the first is raised, those after it, or while we stop, only make us stop at once."""

    def __init__(self) -> None:
        self._count, self._raises = 0, True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1 and self._raises:
            raise KeyboardInterrupt

    def hold(self) -> Callable[[], bool]:
        """Raise none any more; return what tells whether one came from here on."""
        self._raises, before = False, max(1, self._count)
        return lambda: self._count > before


def _run(request: UpRequest, folder: RunFolder, interrupts: _Interrupts) -> int:
    children: list[Child] = []
    grace_s = _FAILED_GRACE_S
    try:
        start(request, folder, children)
        wait_ready(children, Client(request.base_url), request.startup_timeout_s)
        print(f"ready: {request.base_url}/v1 (logs: {folder.path / 'logs'})", flush=True)
        if request.options.detach:
            for child in children:
                child.detach()
            children.clear()
            return 0
        return _stay(children)
    except KeyboardInterrupt:
        print("stopping; requests under way have half a minute (Ctrl-C again: at once)", flush=True)
        grace_s = SCHEDULER_GRACE_S
        return 0
    finally:
        at_once = interrupts.hold()
        if children:
            stop([child.record for child in children], grace_s, at_once)
            folder.clear()


def start(request: UpRequest, folder: RunFolder, children: list[Child]) -> None:
    """Start the processes into `children` and note them in the run folder, whose lock is held. Raises ConfigError."""
    state = folder.read()
    if state is not None and state.living():
        raise ConfigError(f"a cluster already runs at {state.base_url}: `pdserve down` stops it")
    engine, options = request.engine, request.options
    require_free(engine.host, engine.port)
    folder.clear()
    shape = ClusterShape(
        options.prefill, options.decode, engine.host, engine.port, request.flags, engine.device,
        engine.tensor_parallel_size or 1,
    )  # fmt: skip
    for plan in lay_out(shape, folder.tables):
        children.append(Child(plan, folder.log(plan.name), os.environ))
        folder.write(ClusterState(request.base_url, engine.model, tuple(child.record for child in children)))


def _stay(children: Sequence[Child]) -> int:
    """Stay until Ctrl-C or the scheduler's end; say when an instance ends."""
    told: set[str] = set()
    while len(told) < len(children):
        for child in children:
            end = child.ended()
            if end is None or child.record.name in told:
                continue
            told.add(child.record.name)
            if child.record.role == "scheduler" and child.exit_status:
                raise Unavailable(end)
            print(end, flush=True)
        time.sleep(POLL_S)
    return 0
