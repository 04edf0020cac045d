"""Logs are found by name and shown from their end."""

from pathlib import Path

import pytest

from pdserve.logs import Tail, find
from wire.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    (tmp_path / "logs").mkdir()
    for name in ("scheduler", "prefill-0"):
        (tmp_path / "logs" / f"{name}.log").write_text("one\ntwo\n")
    return str(tmp_path)


def test_an_unknown_name_is_answered_with_those_there_are(run_dir: str) -> None:
    with pytest.raises(ConfigError, match="there are prefill-0, scheduler"):
        find(run_dir, "decode-7")


def test_no_logs_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing was started there"):
        find(str(tmp_path), None)


def test_a_tail_shows_the_last_lines_and_then_whole_new_ones(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = find(run_dir, "scheduler")
    tail = Tail(path, with_name=False)

    tail.show_last(1)
    with path.open("a") as log:
        log.write("three\nhalf")
    tail.show_new()

    assert capsys.readouterr().out == "two\nthree\n"


def test_a_log_begun_anew_is_shown_from_its_start(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = find(run_dir, "prefill-0")
    tail = Tail(path, with_name=True)
    tail.show_last(0)

    path.write_text("new\n")
    tail.show_new()

    assert capsys.readouterr().out == "prefill-0  | new\n"
