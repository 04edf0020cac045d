"""Libraries that are not built yet: no process waits for them, one builds, and nothing is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from native.builder import build_library, find_library
from native.cache import BuildFailed, building, library_folder
from native.move_library import RECIPE, build
from tests.native.test_move_library import libraries, needs_compiler, script

_WAIT_S = 300.0
_START = """
import os, signal, sys; sys.path.insert(0, sys.argv[1])
from native.builder import find_library
from native.move_library import RECIPE
found = find_library(RECIPE, os.environ)
print(found.is_awaited, found.build is not None, flush=True)
signal.pause()
"""
_BUILD = "import sys; sys.path.insert(0, sys.argv[1]); from native.build import main; sys.exit(main())"
_ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with its own cache folder."""
    return {"PATH": os.environ["PATH"], "PDSERVE_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def held_cc(tmp_path: Path) -> str:
    """A compiler that waits for a line in `go`, leaves one in `log` when it links, and makes a good library."""
    made = build().path
    os.mkfifo(tmp_path / "go")
    step = f'case "$*" in *" -shared "*) echo built >>"{tmp_path}/log";; *) read line <"{tmp_path}/go";; esac'
    return script(tmp_path, "held-cc", f'{step}; while [ "$1" != -o ]; do shift; done; cp "{made}" "$2"')


@pytest.fixture
def endless_cc(tmp_path: Path) -> str:
    """A compiler that leaves a line in `runs` and never ends; its processes hold the write end of `alive`."""
    for name in ("runs", "alive"):
        os.mkfifo(tmp_path / name)
    text = f'exec 3>"{tmp_path}/alive"; echo half >"$TMPDIR/half"; sleep 600 & echo >"{tmp_path}/runs"; wait'
    return script(tmp_path, "endless-cc", text)


def release(tmp_path: Path) -> None:
    """Release the held compiler."""
    (tmp_path / "go").write_text("go\n")


def nothing_is_left(environ: dict[str, str]) -> bool:
    """Wait for the builder's end; return whether it left no temporary files."""
    with building(library_folder(environ), "move", time.monotonic() + _WAIT_S):
        return libraries(environ) == []


@needs_compiler
def test_a_start_does_not_wait_for_the_build_the_next_start_uses(
    environ: dict[str, str], tmp_path: Path, held_cc: str, caplog: pytest.LogCaptureFixture
) -> None:
    environ["CC"] = held_cc
    caplog.set_level("INFO", "pdserve.native")

    found = find_library(RECIPE, environ)  # the compiler waits for us meanwhile

    assert (found.library, found.is_awaited) == (None, True)
    assert [record.getMessage().split()[:3] for record in caplog.records] == [
        ["native_building", "library=move", "used_from=next_start"]
    ]
    release(tmp_path)
    assert found.build is not None
    assert found.build.wait(_WAIT_S)
    assert caplog.records[1].getMessage() == "native_built library=move used_from=next_start"
    assert find_library(RECIPE, environ).library is not None
    assert (tmp_path / "log").read_text() == "built\n"


@needs_compiler
def test_of_concurrent_starts_one_builds_and_none_waits(environ: dict[str, str], tmp_path: Path, held_cc: str) -> None:
    environ["CC"] = held_cc
    processes = [start(_START, environ) for _ in range(3)]

    answers = sorted(first_line(process) for process in processes)

    assert answers == ["True False", "True False", "True True"]
    release(tmp_path)
    with building(library_folder(environ), "move", time.monotonic() + _WAIT_S):
        assert (tmp_path / "log").read_text() == "built\n"
    for process in processes:
        end(process)
    assert len(libraries(environ)) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_ends_stops_its_build(
    environ: dict[str, str], tmp_path: Path, endless_cc: str, number: signal.Signals
) -> None:
    environ["CC"] = endless_cc
    process = start(_START, environ)
    with (tmp_path / "alive").open("rb") as alive:
        (tmp_path / "runs").read_bytes()

        end(process, number)

        assert alive.read() == b""  # all its processes are gone
    assert nothing_is_left(environ)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_build_leaves_nothing(
    environ: dict[str, str], tmp_path: Path, endless_cc: str, number: signal.Signals
) -> None:
    environ["CC"] = endless_cc
    process = start(_BUILD, environ)
    with (tmp_path / "alive").open("rb") as alive:
        (tmp_path / "runs").read_bytes()

        end(process, number)

        assert alive.read() == b""
    assert nothing_is_left(environ)


def test_a_build_has_a_low_priority(environ: dict[str, str], tmp_path: Path) -> None:
    wait = "until [ $(nice) = 15 ]; do :; done"  # the priority of its group is set just after it has started
    environ["CC"] = script(tmp_path, "nice-cc", f'{wait}; nice >"{tmp_path}/nice"; exit 1')

    found = find_library(RECIPE, environ)

    assert found.build is not None
    assert found.build.wait(_WAIT_S)
    assert (tmp_path / "nice").read_text() == "15\n"


def test_a_failed_build_is_not_retried_at_each_start(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ["CC"] = script(tmp_path, "bad-cc", f'echo tried >>"{tmp_path}/log"; exit 1')
    first = find_library(RECIPE, environ)
    assert first.build is not None
    assert first.build.wait(_WAIT_S)
    caplog.clear()

    second = find_library(RECIPE, environ)

    assert (second.is_awaited, second.build) == (False, None)
    assert (tmp_path / "log").read_text() == "tried\n"
    (record,) = caplog.records
    assert "the build failed before (`python -m native.build` tries again): " in record.getMessage()


@needs_compiler
def test_a_failed_build_can_be_retried(environ: dict[str, str], tmp_path: Path) -> None:
    made, bad = build().path, tmp_path / "bad"
    text = f'[ ! -e "{bad}" ] || exit 1; while [ "$1" != -o ]; do shift; done; cp "{made}" "$2"'
    environ["CC"] = script(tmp_path, "mended-cc", text)
    bad.touch()
    with pytest.raises(BuildFailed):
        build_library(RECIPE, environ)
    bad.unlink()

    build_library(RECIPE, environ)

    assert find_library(RECIPE, environ).library is not None
    assert [name for name in libraries(environ) if name.endswith(".failed")] == []


@needs_compiler
def test_a_library_that_fails_its_check_is_a_failed_build(environ: dict[str, str], tmp_path: Path) -> None:
    environ["CC"] = script(tmp_path, "odd-cc", 'while [ "$1" != -o ]; do shift; done; echo odd >"$2"')

    with pytest.raises(BuildFailed, match="cannot be loaded"):
        build_library(RECIPE, environ)

    assert [Path(name).suffix for name in libraries(environ)] == [".failed"]


def test_every_source_is_compiled_separately(environ: dict[str, str], tmp_path: Path) -> None:
    environ["CC"] = script(tmp_path, "list-cc", f'echo "$@" >>"{tmp_path}/log"; exit 1')
    shutil.rmtree(library_folder(environ), ignore_errors=True)

    with pytest.raises(BuildFailed):
        build_library(RECIPE, environ)

    (line,) = (tmp_path / "log").read_text().splitlines()
    assert " -c " in line
    assert line.endswith("move.c")


def start(code: str, environ: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-c", code, _ROOT]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: "subprocess.Popen[str]", number: signal.Signals = signal.SIGTERM) -> None:
    with process:
        process.send_signal(number)
        process.wait(_WAIT_S)
