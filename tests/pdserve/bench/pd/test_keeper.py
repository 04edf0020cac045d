"""The keeper's processes run on their cores, and end with their children when the keeper's starter is gone."""

import os
import subprocess
import sys

import psutil
import pytest

from pdserve import parent_death
from pdserve.bench.pd.contestants import halves, kept
from pdserve.bench.pd.keeper import parse_cores
from wire.errors import ConfigError

DEADLINE_S = 300.0
# A peer that does not read the pipe: it prints its cores and its child's pid, and neither would ever end.
STRANGER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(sorted(os.sched_getaffinity(0)), child.pid, flush=True)
time.sleep(600)
"""


def test_a_group_ends_with_its_starters_pipe() -> None:
    core = min(os.sched_getaffinity(0))
    held, ours = os.pipe()
    process = subprocess.Popen(
        kept([core], [sys.executable, "-c", STRANGER]), env={**os.environ, parent_death.VARIABLE: str(held)},
        pass_fds=(held,), stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    os.close(held)
    assert process.stdout is not None
    cores, _, child = process.stdout.readline().rpartition(" ")
    processes = [psutil.Process(process.pid), psutil.Process(int(child))]
    assert cores == f"[{core}]"
    assert all(one.is_running() for one in processes)

    os.close(ours)

    assert process.wait(DEADLINE_S) == -9
    _, left = psutil.wait_procs(processes, DEADLINE_S)
    assert not left
    process.stdout.close()


def test_cores_are_halved_as_by_a_table_of_two_instances() -> None:
    assert halves([0, 1]) == ([0], [1])
    assert halves([2, 3, 5, 7, 8]) == ([2, 3], [5, 7, 8])
    assert halves([4]) == ([4], [4])


def test_an_invalid_list_of_cores_is_refused() -> None:
    assert parse_cores("0,3") == {0, 3}
    with pytest.raises(ConfigError, match="'all' is not a list of cores"):
        parse_cores("all")
