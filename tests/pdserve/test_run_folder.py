"""The run folder: state that survives, processes distinguished from reused pids, a lock with one holder."""

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.run_folder import (
    ClusterState,
    ProcessRecord,
    RunFolder,
    default_cache_dir,
    default_run_dir,
    last_line,
    last_lines,
    open_log,
    start_time,
)
from wire.errors import ConfigError


def _record(pid: int, started: int) -> ProcessRecord:
    return ProcessRecord("decode-0", "decode", pid, started, "127.0.0.1:8089", "/log")


def test_state_reads_back_as_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    state = ClusterState("http://127.0.0.1:9000", "/model", (_record(1, 2), _record(3, 4)))

    folder.write(state)

    assert folder.read() == state


@pytest.mark.parametrize("before", ["no folder", "a folder that others may read"])
def test_a_run_folder_is_accessible_only_to_its_owner(tmp_path: Path, before: str) -> None:
    folder = RunFolder(tmp_path / "run")
    if before != "no folder":
        folder.log("any").parent.mkdir(parents=True, mode=0o755)
        folder.path.chmod(0o755)

    with folder.lock():
        folder.write(ClusterState("http://127.0.0.1:9000", "/model", ()))
        open_log(folder.log("decode-0")).close()

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder.path, *folder.path.rglob("*"))}
    assert {name: oct(modes[name]) for name in ("run", "lock", "state.json", "decode-0.log")} == {
        "run": "0o700", "lock": "0o600", "state.json": "0o600", "decode-0.log": "0o600",
    }  # fmt: skip


def test_a_folder_with_other_files_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    tmp_path.chmod(0o755)

    with RunFolder(tmp_path).lock():
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_cluster_is_up_while_its_supervisor_lives(tmp_path: Path) -> None:
    folder, started = RunFolder(tmp_path), start_time(os.getpid()) or 0
    gone, watcher = _record(os.getpid(), started + 1), _record(os.getpid(), started)
    gone = replace(gone, restarts=2, note="starting again")
    state = ClusterState("http://127.0.0.1:9000", "/model", (gone,), watcher)

    folder.write(state)

    assert folder.read() == state
    assert (state.living(), state.is_up) == ((), True)
    assert not replace(state, supervisor=gone).is_up
    assert not replace(state, supervisor=None).is_up


def test_a_starting_cluster_is_recorded_as_starting(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    state = ClusterState("http://127.0.0.1:9000", "/model", (), is_starting=True)

    folder.write(state)
    read = folder.read()
    (tmp_path / "state.json").write_text('{"base_url": "http://127.0.0.1:9000", "model": "/model", "processes": []}')

    assert read == state
    assert folder.read() == replace(state, is_starting=False)


def test_a_folder_without_state_has_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).read() is None


def test_an_invalid_state_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"processes": [{"pid": 1}]}')

    with pytest.raises(ConfigError, match=r"state\.json was not written by pdserve"):
        RunFolder(tmp_path).read()


def test_a_state_is_synced_to_disk_before_its_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, kept, sync = RunFolder(tmp_path), list[tuple[str, bool]](), os.fsync

    def watched(descriptor: int) -> None:
        text = Path(f"/proc/self/fd/{descriptor}").read_text()
        kept.append((text, (tmp_path / "state.json").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)

    folder.write(ClusterState("http://x", "m", ()))

    assert kept == [((tmp_path / "state.json").read_text(), False)]


def test_a_state_that_cannot_be_written_leaves_no_files(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "state.json").mkdir()  # its name is taken

    for _ in range(2):
        with pytest.raises(OSError, match=r"state\.json"):
            folder.write(ClusterState("http://x", "m", ()))
    (tmp_path / "state.json").rmdir()
    folder.clear()

    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_removed_unless_the_folder_is_locked(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.lock():
        folder.write(ClusterState("http://x", "m", ()))
        folder.tables.mkdir()
        folder.clear_unless_held()
        while_held = folder.read(), folder.tables.exists()

    folder.clear_unless_held()

    assert while_held == (ClusterState("http://x", "m", ()), True)
    assert (folder.read(), folder.tables.exists()) == (None, False)


def test_clearing_without_a_run_creates_no_folder(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").clear_unless_held()

    assert list(tmp_path.iterdir()) == []


def test_clear_keeps_the_logs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write(ClusterState("http://x", "m", ()))
    folder.tables.mkdir()
    folder.log("scheduler").parent.mkdir()
    folder.log("scheduler").write_text("line\n")

    folder.clear()

    assert folder.read() is None
    assert not folder.tables.exists()
    assert folder.log("scheduler").exists()


def test_a_new_run_moves_every_log_of_the_last_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log("decode-1").parent.mkdir()
    folder.log("decode-1").write_text("of a cluster with two\n")

    folder.rename_old_logs()

    assert not folder.log("decode-1").exists()
    assert folder.log("decode-1").with_name("decode-1.log.1").read_text() == "of a cluster with two\n"


def test_a_pid_with_another_start_time_is_not_alive() -> None:
    started = start_time(os.getpid())

    assert started is not None
    assert _record(os.getpid(), started).alive
    assert not _record(os.getpid(), started + 1).alive


# The name of a process may be any bytes.
_NAMED = """
import signal
with open("/proc/self/comm", "wb") as name:
    name.write(b"a\\xff) b")
print("named", flush=True)
signal.pause()
"""


def test_a_process_with_a_reused_pid_may_have_any_name() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", _NAMED], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"named\n"
            started = start_time(process.pid)
        finally:
            process.kill()

    assert started is not None
    assert started >= (start_time(os.getpid()) or 0)


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert start_time(child.pid) is None
    child.wait()


def test_the_lock_has_one_holder(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).lock(),
        pytest.raises(ConfigError, match="another pdserve"),
        RunFolder(tmp_path).lock(),
    ):
        pass

    with RunFolder(tmp_path).lock():
        pass


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PDSERVE_RUN_DIR": "/r", "XDG_STATE_HOME": "/s", "HOME": "/h"}, "/r"),
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/pdserve"),
        ({"HOME": "/h"}, "/h/.local/state/pdserve"),
    ],
)
def test_the_run_folder_follows_the_environment(environ: dict[str, str], expected: str) -> None:
    assert default_run_dir(environ) == Path(expected)


def test_the_cache_folder_follows_the_environment() -> None:
    assert default_cache_dir({"PDSERVE_CACHE_DIR": "/c"}) == Path("/c")
    assert default_cache_dir({"HOME": "/h"}) == Path("/h/.cache/pdserve")


def test_last_line_skips_blank_lines(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("first\nlast words\n\n")

    assert last_line(log) == "last words"
    assert last_lines(log, 5) == ["first", "last words"]
    assert last_line(tmp_path / "missing.log") == "(no log)"


@pytest.mark.parametrize("text", ['"text"', "[]", "null", "\udc80"])
def test_a_state_file_without_an_object_is_refused_by_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_bytes(text.encode(errors="surrogateescape"))

    with pytest.raises(ConfigError, match=r"state\.json was not written by pdserve"):
        RunFolder(tmp_path).read()


def test_an_unusable_folder_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / "file" / "run")
    words = (
        rf"the run folder {folder.path} cannot be used: Not a directory: "
        "choose another one with --run-dir or PDSERVE_RUN_DIR"
    )

    with pytest.raises(ConfigError, match=words):
        folder.read()
    with pytest.raises(ConfigError, match=words), folder.lock():
        pass


def test_a_folder_with_the_locks_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()

    with pytest.raises(ConfigError, match="cannot be used: Is a directory"), RunFolder(tmp_path).lock():
        pass


def test_a_folder_whose_tables_are_not_ours_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.tables.mkdir()

    with pytest.raises(ConfigError, match="has tables that pdserve did not write there"), folder.lock():
        pass
    assert [*tmp_path.iterdir()] == [folder.tables]

    folder.tables.rmdir()
    for _ in "killed", "starts again":
        with folder.lock():
            folder.tables.mkdir(exist_ok=True)
