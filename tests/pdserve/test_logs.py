"""Logs are found by name and shown from their end."""

import os
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.logs import Tail, find
from pdserve.run_folder import ClusterState, ProcessRecord, RunFolder, start_time
from wire.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    (tmp_path / "logs").mkdir()
    for name in ("scheduler", "prefill-0"):
        (tmp_path / "logs" / f"{name}.log").write_text("one\ntwo\n")
    return str(tmp_path)


def test_an_unknown_name_gets_the_known_ones(run_dir: str) -> None:
    with pytest.raises(ConfigError, match="the logs are prefill-0, scheduler"):
        find(run_dir, "decode-7")


def test_missing_logs_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no cluster was started there"):
        find(str(tmp_path), None)


def test_a_tail_shows_the_last_lines_and_then_whole_new_ones(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = find(run_dir, "scheduler")
    tail = Tail(path, with_name=False)

    tail.show_last(1)
    with path.open("a") as log:
        log.write("three\nhalf")
    tail.show_new()

    assert capsys.readouterr().out == "two\nthree\n"


def test_a_restarted_log_is_shown_from_its_start(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = find(run_dir, "prefill-0")
    tail = Tail(path, with_name=True)
    tail.show_last(0)

    path.write_text("new\n")
    tail.show_new()

    assert capsys.readouterr().out == "prefill-0  | new\n"


def test_a_new_log_longer_than_the_last_one_is_shown_whole(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = find(run_dir, "prefill-0")
    tail = Tail(path, with_name=False)
    tail.show_last(0)

    path.replace(f"{path}.1")  # as a new run does
    path.write_text("a longer first line\nand another\n")
    tail.show_new()
    path.replace(f"{path}.1")
    tail.show_new()

    assert capsys.readouterr().out == "a longer first line\nand another\n"


def test_logs_of_an_ended_cluster_begin_with_a_notice(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", "--run-dir", run_dir, "scheduler"]) == 0

    shown = capsys.readouterr()
    assert shown.err == f"no cluster of `pdserve up` runs in {run_dir} now: these are the logs of the last one\n"
    assert shown.out == "one\ntwo\n"


def test_logs_of_a_running_cluster_have_no_notice(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    watcher = ProcessRecord("supervisor", "supervisor", os.getpid(), start_time(os.getpid()) or 0, "", "/l")
    RunFolder(Path(run_dir)).write(ClusterState("http://127.0.0.1:9000", "m", (), watcher))

    assert cli.main(["logs", "--run-dir", run_dir, "scheduler"]) == 0

    assert capsys.readouterr().err == ""


def test_an_unreadable_state_keeps_no_log_from_being_shown(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(run_dir) / "state.json").write_text("{")

    assert cli.main(["logs", "--run-dir", run_dir, "scheduler"]) == 0

    shown = capsys.readouterr()
    assert "state.json was not written by pdserve" in shown.err
    assert shown.out == "one\ntwo\n"
