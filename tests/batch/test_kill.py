"""A run that is killed at any moment and run again ends with the same file as one that was never killed."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes.failpoints import BATCH_POINTS, VARIABLE
from tests.batch.killed_run import job_in, run
from tests.batch.scripted import line, plain, read_lines, write_lines

CLONE = Path(__file__).parents[2]
NUM_LINES = 60
DEADLINE_S = 300.0
KILLED = -9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the input: as many lines as NUM_LINES, a blank one, CRLF in places and no last newline."""
    return _write_input(tmp_path)


def _write_input(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = write_lines(folder / "in.jsonl", map(line, range(1, NUM_LINES + 1)))
    text = path.read_text().replace("\n", "\r\n", 5).replace("\n", "\n\n", 1)
    path.write_text(text.rstrip("\n"), newline="")
    return folder


@pytest.fixture
def unkilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    folder = _write_input(tmp_path_factory.mktemp("unkilled"))
    run(folder)
    return folder


def _run(folder: Path, failpoint: str = "", max_file_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.batch.killed_run", str(folder)]
    if max_file_bytes is not None:
        command.append(str(max_file_bytes))
    environment = os.environ | {VARIABLE: failpoint}
    return subprocess.run(
        command, env=environment, cwd=CLONE, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def _check(folder: Path, unkilled: Path) -> None:
    """Both files equal those of the undisturbed run, and nothing is left beside them but its note."""
    for name in ("out.jsonl", "err.jsonl"):
        assert plain(folder / name) == plain(unkilled / name)
    assert sorted(os.listdir(folder)) == ["err.jsonl", "in.jsonl", "out.jsonl", "out.jsonl.asked"]
    assert len({one["id"] for one in read_lines(folder / "out.jsonl")}) == NUM_LINES


def _points() -> Iterator[str]:
    """Yield 20 moments: each place once, the others at random hits of a line's places."""
    once = [name for name in BATCH_POINTS if "rename" in name]
    yield from (f"{name}=kill9" for name in once)
    chance = random.Random(8)
    for _ in range(20 - len(once)):
        yield f"{chance.choice(['batch.before_write', 'batch.after_write'])}=kill9@{chance.randint(1, NUM_LINES)}"


_POINTS = list(_points())
_CASES = [*_POINTS[:6], *(pytest.param(point, marks=pytest.mark.long) for point in _POINTS[6:])]


@pytest.mark.parametrize("failpoint", _CASES)
def test_a_run_killed_once_ends_as_an_undisturbed_one(folder: Path, unkilled: Path, failpoint: str) -> None:
    killed = _run(folder, failpoint)

    assert killed.returncode == KILLED, killed.stderr
    hit = int(failpoint.partition("@")[2] or NUM_LINES)
    kept = hit - 1 if "before_write" in failpoint else hit
    assert run(folder).resumed == kept
    _check(folder, unkilled)


def test_a_run_killed_repeatedly_ends_as_an_undisturbed_one(folder: Path, unkilled: Path) -> None:
    for hit in (3, 1, 9, 9, 1, 20):
        assert _run(folder, f"batch.after_write=kill9@{hit}").returncode == KILLED
    for name in ("before_rename", "between_renames", "after_rename"):
        assert _run(folder, f"batch.{name}=kill9").returncode == KILLED

    assert run(folder).resumed == NUM_LINES
    _check(folder, unkilled)


def test_a_run_killed_within_a_record_can_still_be_completed(folder: Path, unkilled: Path) -> None:
    assert _run(folder, "batch.after_write=kill9@30").returncode == KILLED
    journal = job_in(folder).journal_path
    os.truncate(journal, journal.stat().st_size - 10)

    assert run(folder).resumed == 29
    _check(folder, unkilled)


def test_the_old_output_stays_until_the_new_one_is_complete(folder: Path) -> None:
    (folder / "out.jsonl").write_text("old")

    for name in ("before_rename", "between_renames"):
        assert _run(folder, f"batch.{name}=kill9").returncode == KILLED
        assert (folder / "out.jsonl").read_text() == "old"

    assert _run(folder, "batch.after_rename=kill9").returncode == KILLED
    assert len(read_lines(folder / "out.jsonl")) == NUM_LINES


def test_a_full_disk_stops_the_run_which_can_be_resumed(folder: Path, unkilled: Path) -> None:
    stopped = _run(folder, max_file_bytes=8000)

    assert stopped.returncode == 1, stopped.stderr
    reported = re.search(
        r"journal: File too large; (\d+) of 60 lines are answered and kept in .*out\.jsonl\.journal", stopped.stdout
    )
    assert reported
    assert int(reported[1]) > 0
    assert not (folder / "out.jsonl").exists()
    assert run(folder).resumed == int(reported[1])
    _check(folder, unkilled)


def test_a_disk_too_full_for_the_output_keeps_every_answer(folder: Path, unkilled: Path) -> None:
    assert _run(folder, "batch.before_rename=kill9").returncode == KILLED

    stopped = _run(folder, max_file_bytes=5000)

    assert stopped.returncode == 1, stopped.stderr
    assert "out.jsonl: File too large; 60 of 60 lines are answered" in stopped.stdout
    assert not (folder / "out.jsonl").exists()
    assert run(folder).resumed == NUM_LINES
    _check(folder, unkilled)
