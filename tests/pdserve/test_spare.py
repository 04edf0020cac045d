"""The warm spare: when there is one, and that it becomes the process whose command line it receives."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest

from pdserve.process_plan import ProcessPlan, launch_command
from pdserve.processes import Child
from pdserve.restarts import RestartLimits, Restarts
from pdserve.run_folder import ProcessRecord
from pdserve.spare import MAX_BYTES, MIN_FREE_BYTES, Spare, SpareKeeper, why_no_spare
from scheduler.http.keys import VARIABLES

_DEADLINE_S = 300.0
_ROOT = Path(__file__).parents[2]
_ENGINE = ("--engine", "fake", "--model", "m")


def _plan(*flags: str, **env: str) -> ProcessPlan:
    return ProcessPlan("decode-0", "decode", "127.0.0.1:1", launch_command("127.0.0.1", 1, flags), env)


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Spare]:
    spare = Spare(_ENGINE, tmp_path / "spare.log", os.environ | dict.fromkeys(VARIABLES, "k" * 20))
    deadline = time.monotonic() + _DEADLINE_S
    while not spare.is_warm:
        assert spare.child.ended() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield spare
    spare.end()


def _final_log(child: Child) -> str:
    deadline = time.monotonic() + _DEADLINE_S
    while child.ended() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return Path(child.record.log).read_text()


def test_it_runs_the_command_line_in_its_environment(warm: Spare, tmp_path: Path) -> None:
    log, pid = tmp_path / "decode-0.log", warm.child.record.pid
    log.write_text("before\n")
    tables = {"GLOBAL_RANK_TABLE_FILE_PATH": str(tmp_path / "g.json"), "RANK_TABLE_FILE_PATH": str(tmp_path / "l.json")}

    child = warm.become(_plan("--startup-timeout", "0.1", **tables), log, {**os.environ, "PDSERVE_MOOD": "x"})

    assert child is not None
    assert (child.record.name, child.record.role, child.record.pid) == ("decode-0", "decode", pid)
    message = _final_log(child)
    assert message.startswith("before\n")
    assert str(tmp_path / "g.json") in message or str(tmp_path / "l.json") in message
    assert "PDSERVE_MOOD" not in message  # `up` has printed so
    assert child.exit_status == 2


def test_it_holds_neither_keys_nor_devices_while_it_waits(warm: Spare) -> None:
    folder = Path(f"/proc/{warm.child.record.pid}")

    assert b"k" * 20 not in (folder / "environ").read_bytes()
    assert (folder / "oom_score_adj").read_text() == "1000\n"
    held = [os.readlink(one) for one in (folder / "fd").iterdir()]
    assert not [path for path in held if path.startswith(("/dev/nvidia", "/dev/davinci", "socket:"))]


def test_an_invalid_command_line_ends_it(warm: Spare, tmp_path: Path) -> None:
    assert warm.become(_plan(HUGE="x" * MAX_BYTES), tmp_path / "log", os.environ) is None
    assert warm.child.ended() is not None


def test_a_spare_starts_in_the_supervisors_removed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    spare = Spare(_ENGINE, tmp_path / "spare.log", os.environ | {"PYTHONPATH": str(_ROOT)})
    (tmp_path / "gone").rmdir()
    try:
        child = spare.become(_plan(), tmp_path / "log", {"PATH": os.environ["PATH"]})
        assert child is not None

        assert "GLOBAL_RANK_TABLE_FILE_PATH is not set" in _final_log(child)
    finally:
        spare.end()


class _Spare:
    """A spare whose warmth and life the test sets."""

    def __init__(self) -> None:
        self.is_warm, self.is_ended, self.end_words = False, False, ""
        self.child = self
        self.record = ProcessRecord("spare", "spare", os.getpid(), 1, "", "")

    def ended(self) -> str | None:
        return self.end_words or None

    def become(self, plan: ProcessPlan, log: Path, environ: Mapping[str, str]) -> Child | None:
        return cast("Child", (plan, log))

    def end(self) -> None:
        self.is_ended = True


class _Rig:
    def __init__(self, why_none: str = "") -> None:
        self.free_bytes, self.messages, self.made = MIN_FREE_BYTES, list[str](), list[_Spare]()
        restarts = Restarts(RestartLimits(max_restarts=1, window_s=60.0, first_wait_s=1.0))
        self.keeper = SpareKeeper(self._make, restarts, self.messages.append, why_none, self._free)

    def _free(self) -> int:
        if self.free_bytes < 0:
            raise OSError("no /proc")
        return self.free_bytes

    def _make(self) -> Spare:
        self.made.append(_Spare())
        return cast("Spare", self.made[-1])


def test_none_is_created_while_a_process_starts() -> None:
    rig = _Rig()
    rig.keeper.tick(0.0, is_calm=False)
    assert (rig.made, rig.keeper.record.note) == ([], "the cluster is starting")

    rig.keeper.tick(1.0, is_calm=True)

    assert (len(rig.made), rig.keeper.record.note) == (1, "warming up")


def test_none_is_created_with_little_memory_until_there_is_more() -> None:
    rig = _Rig()
    rig.free_bytes = MIN_FREE_BYTES - 10**9
    rig.keeper.tick(0.0, is_calm=True)
    assert (rig.made, rig.keeper.record.note) == ([], "3.0 GB of memory are free, but a spare needs 4 GB")

    rig.free_bytes = MIN_FREE_BYTES
    rig.keeper.tick(10.0, is_calm=True)

    assert len(rig.made) == 1


def test_without_a_memory_figure_none_is_created_and_nothing_ends() -> None:
    rig = _Rig()
    rig.free_bytes = -1

    rig.keeper.tick(0.0, is_calm=True)

    assert (rig.made, rig.messages) == ([], ["the spare cannot be started: no /proc; another is started in 1 s"])


def test_only_a_warm_one_is_used_and_another_created_after_it() -> None:
    rig, log = _Rig(), Path("log")
    rig.keeper.tick(0.0, is_calm=True)
    assert rig.keeper.take(_plan(), log, {}) is None
    rig.made[0].is_warm = True
    other_program = ProcessPlan("decode-0", "decode", "x:1", (sys.executable, "-c", ""), {})
    assert rig.keeper.take(other_program, log, {}) is None

    assert rig.keeper.take(_plan(), log, {}) is not None
    assert rig.keeper.take(_plan(), log, {}) is None
    assert rig.keeper.record.note == "it became decode-0"
    rig.keeper.tick(1.0, is_calm=True)

    assert len(rig.made) == 2
    assert not rig.made[0].is_ended


def test_a_spare_that_dies_is_recreated_until_it_dies_too_often() -> None:
    rig = _Rig()
    for now in (0.0, 0.5, 1.5, 2.0, 50.0):
        rig.keeper.tick(now, is_calm=True)
        if rig.made and now != 0.5:
            rig.made[-1].end_words = "spare ended"

    assert len(rig.made) == 2
    assert rig.messages == ["spare ended; another is started in 1 s", "spare ended; no other is started"]
    assert rig.keeper.record.note == "spare ended"


@pytest.mark.parametrize(
    ("wanted", "environ", "why"),
    [
        (True, {}, ""),
        (True, {"OMP_PROC_BIND": "close"}, "OMP_PROC_BIND is set"),
        (False, {}, "--no-spare"),
    ],
)
def test_the_reason_for_no_spare_names_flag_or_variable(wanted: bool, environ: dict[str, str], why: str) -> None:
    assert why_no_spare(wanted, environ) == why
    if why:
        rig = _Rig(why)
        rig.keeper.tick(0.0, is_calm=True)
        assert (rig.made, rig.keeper.record.note) == ([], why)
