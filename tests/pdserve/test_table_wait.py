"""A process that starts before its table is complete waits for it."""

import json
from pathlib import Path

import pytest

from pdserve.launch import plan_of
from pdserve.table_wait import when_completed
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import LaunchPlan, resolve


class Starting:
    """The scheduler's tables, and a clock that sleeping moves."""

    def __init__(self, folder: Path) -> None:
        made = gen(
            GenArguments(["0"], ["1"], True, str(folder), "127.0.0.1", "8088,8089", "cpu"), lambda line: None, {}
        )
        assert made.host is not None
        self.path = folder / made.global_name
        self.document = json.loads(self.path.read_text())
        local = str(folder / made.host.file_name)
        self.environ = {"GLOBAL_RANK_TABLE_FILE_PATH": str(self.path), "RANK_TABLE_FILE_PATH": local}
        self.now, self.completes_at, self.messages = 0.0, 3.0, list[str]()
        self.write("initializing")

    def write(self, status: str) -> None:
        """Write the table with this status."""
        self.path.write_text(json.dumps({**self.document, "status": status}))

    def sleep(self, seconds: float) -> None:
        """Let time pass; the writer may complete the table meanwhile."""
        self.now += seconds
        if self.now >= self.completes_at:
            self.write("completed")

    def wait(self, timeout_s: float) -> LaunchPlan:
        """Wait for the plan."""
        return when_completed(
            lambda: resolve(self.environ), timeout_s, self.messages.append, clock=lambda: self.now, sleep=self.sleep
        )


def test_the_plan_is_that_of_the_completed_table(tmp_path: Path) -> None:
    starting = Starting(tmp_path)

    plan = starting.wait(600.0)

    assert plan.role == "scheduler"
    assert starting.now == 3.0
    (message,) = starting.messages
    assert message.startswith("waiting: GLOBAL_RANK_TABLE_FILE_PATH: ")
    assert 'status is "initializing"' in message


def test_a_table_that_is_not_completed_in_time_is_an_error(tmp_path: Path) -> None:
    starting = Starting(tmp_path)

    with pytest.raises(RanktableError, match=r'"initializing".* \(waited 2 s, --startup-timeout\)'):
        starting.wait(2.0)


def test_other_errors_are_not_waited_for(tmp_path: Path) -> None:
    starting = Starting(tmp_path)
    starting.write("done")

    with pytest.raises(RanktableError, match='status is "done"'):
        starting.wait(600.0)
    assert starting.now == 0.0


def test_the_wait_at_startup_is_limited_by_its_flag(tmp_path: Path) -> None:
    starting = Starting(tmp_path)

    with pytest.raises(RanktableError, match=r"waited 0\.001 s"):
        plan_of(["--startup-timeout=0.001"], starting.environ)
