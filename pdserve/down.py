"""`pdserve down`: stop what `pdserve up` started."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from pdserve.flags.parser import CommandParser
from pdserve.leftovers import end_leftovers
from pdserve.processes import INSTANCE_GRACE_S, KILL_WAIT_S, SCHEDULER_GRACE_S, send_signal, stop, wait
from pdserve.run_folder import ClusterState, ProcessRecord, RunFolder, default_run_dir
from pdserve.target_cluster import DEFAULT_URL, is_scheduler

_AGAIN_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 also when nothing runs."""
    parser = CommandParser(prog="pdserve down", description="Stop the cluster that `pdserve up` started.")
    parser.add_argument("--run-dir", default=str(default_run_dir(os.environ)), help="the run folder given to `up`")
    parser.add_argument(
        "--timeout",
        type=float,
        default=SCHEDULER_GRACE_S,
        help="seconds before processes that still run are killed (default: %(default)g)",
    )
    arguments = parser.parse_args(argv)
    folder = RunFolder(Path(arguments.run_dir).absolute())
    state = folder.read()
    is_up = state is not None and state.is_up
    if state is not None and is_up:
        killed = end(state, arguments.timeout)
        print(f"stopped {', '.join(process.name for process in state.processes) or 'a cluster that was starting'}")
        for process in killed:
            print(f"{process.name} did not stop in time and was killed (log: {process.log})")
    left = "" if state is None else end_leftovers(state.processes)
    if left or not is_up:
        print(left or _nothing_to_stop(folder))
    folder.clear_unless_held()
    return 0


def _nothing_to_stop(folder: RunFolder) -> str:
    if not is_scheduler(DEFAULT_URL):
        return "no cluster is running here"
    return (
        f"nothing was stopped: no cluster of `pdserve up` runs in {folder.path}. The scheduler at {DEFAULT_URL} was "
        "started otherwise: stop its processes yourself, or pass its run folder with --run-dir"
    )


def end(state: ClusterState, timeout_s: float) -> tuple[ProcessRecord, ...]:
    """Stop a cluster, through its supervisor if that runs; return the processes that did not stop in time."""
    watcher = state.supervisor
    if watcher is None or not watcher.alive:
        return stop(state.living(), timeout_s)
    send_signal(watcher, signal.SIGTERM)
    late = wait([one for one in state.processes if one.role == "scheduler"], timeout_s)
    for _ in range(round((INSTANCE_GRACE_S + 2 * KILL_WAIT_S) / _AGAIN_S)):
        if late:
            send_signal(watcher, signal.SIGTERM)  # the second SIGTERM stops it at once
        if not wait([watcher], _AGAIN_S):
            return late
    send_signal(watcher, signal.SIGKILL)
    return wait(state.processes, KILL_WAIT_S) or late  # the processes die with their supervisor
