"""A native library is built once, loaded often, and not required."""

import logging
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from native.builder import find_library
from native.cache import NoNative, building, library_folder
from native.libraries import RECIPES
from native.memory import Region, RegionRuns, Runs
from native.move_library import RECIPE, VARIABLE, Library, build, load

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="missing tool: a C compiler"
)
needs_permissions = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
EMPTY_DIGEST = 0x2D06800538D394C2
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from native.move_library import build; print(build().path.name)"
BUILD = [sys.executable, "-P", "-c", _CODE, str(Path(__file__).parents[2])]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library."""
    folder = tmp_path_factory.mktemp("built")
    return build({"PATH": os.environ["PATH"], "PDSERVE_CACHE_DIR": str(folder)}).path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with its own cache folder."""
    return {"PATH": os.environ["PATH"], "PDSERVE_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def quick_cc(tmp_path: Path, built: Path) -> str:
    """A compiler that only copies a file, and leaves a line in `log` each time."""
    log = f'case "$*" in *" -shared "*) echo built >>"{tmp_path}/log";; esac'
    text = f'{log}; while [ "$1" != -o ]; do shift; done; cp "{built}" "$2"'
    return script(tmp_path, "quick-cc", text)


def script(folder: Path, name: str, text: str) -> str:
    """Write a program."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def libraries(environ: dict[str, str]) -> list[str]:
    """Return the files in the cache, without locks."""
    return sorted(path.name for path in library_folder(environ).iterdir() if path.suffix != ".lock")


def load_and_wait(environ: dict[str, str]) -> Library | None:
    """Return the result of `load`, after the end of a build that it may have started."""
    found = find_library(RECIPE, environ)
    assert found.build is None or found.build.wait(300)
    return found.library


def digest_of_nothing(library: Library) -> int:
    return library.digest(RegionRuns(Region(b""), 0, Runs([])))


@needs_compiler
def test_a_second_load_reuses_the_library_of_the_first(environ: dict[str, str], tmp_path: Path, quick_cc: str) -> None:
    environ["CC"] = quick_cc

    first, second = build(environ), load(environ)

    assert second is not None
    assert digest_of_nothing(first) == digest_of_nothing(second) == EMPTY_DIGEST
    assert (tmp_path / "log").read_text() == "built\n"
    assert len(libraries(environ)) == 1
    assert library_folder(environ).stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_another_compiler_builds_again(environ: dict[str, str], tmp_path: Path, quick_cc: str) -> None:
    build({**environ, "CC": quick_cc})
    newer = script(tmp_path, "newer-cc", f'exec {quick_cc} "$@"')

    build({**environ, "CC": newer})

    assert len(libraries(environ)) == 2


@needs_compiler
def test_without_a_compiler_a_library_built_earlier_is_used(
    environ: dict[str, str], tmp_path: Path, quick_cc: str
) -> None:
    build({**environ, "CC": quick_cc})
    environ["PATH"] = str(tmp_path)

    assert digest_of_nothing(build(environ)) == EMPTY_DIGEST


@needs_compiler
def test_a_library_that_does_not_load_is_built_again(environ: dict[str, str], quick_cc: str) -> None:
    environ["CC"] = quick_cc
    subprocess.run(BUILD, env=environ, check=True, timeout=300)  # a library loaded under this name would be reused
    (path,) = library_folder(environ).glob("*.so")
    path.write_bytes(b"cut short")

    assert digest_of_nothing(build(environ)) == EMPTY_DIGEST
    assert path.stat().st_size > 1000


@needs_compiler
def test_a_library_writable_by_others_is_not_used(environ: dict[str, str], quick_cc: str) -> None:
    environ["CC"] = quick_cc
    path = build(environ).path
    path.chmod(0o722)
    before = path.stat().st_ino

    build(environ)

    assert path.stat().st_ino != before
    assert path.stat().st_mode & 0o022 == 0


def test_the_value_off_builds_nothing(environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    environ[VARIABLE] = "off"

    assert load(environ) is None
    assert not library_folder(environ).exists()
    assert not caplog.records


def test_other_values_are_refused(environ: dict[str, str]) -> None:
    environ[VARIABLE] = "sometimes"

    with pytest.raises(ValueError, match="PDSERVE_NATIVE=sometimes"):
        load(environ)


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("false", "false ended with 1"),
        ("no-such-compiler", "CC=no-such-compiler is not on the path"),
        ("'unclosed", "is not a command"),
        ("true", "true exited with 0"),  # and created nothing
    ],
)
def test_a_failed_build_is_one_warning(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture, compiler: str, message: str
) -> None:
    environ["CC"] = compiler

    with caplog.at_level(logging.WARNING):
        assert load_and_wait(environ) is None

    (record,) = caplog.records
    assert record.name == "pdserve.native"
    assert record.getMessage().startswith("native_unavailable library=move reason=")
    assert message in record.getMessage()


def test_a_compilers_message_is_logged_on_one_line(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ["CC"] = script(tmp_path, "loud-cc", "printf 'first\\nsecond\\033[31m'; exit 3")

    assert load_and_wait(environ) is None

    assert "ended with 3: first second" in caplog.text
    assert "\x1b" not in caplog.text
    assert not [name for name in libraries(environ) if not name.endswith(".failed")]


def test_a_missing_compiler_is_a_warning(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ["PATH"] = str(tmp_path)

    assert load(environ) is None
    assert "there is no C compiler" in caplog.text


def test_a_compiler_past_its_deadline_is_killed_with_its_children(environ: dict[str, str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    environ["CC"] = script(tmp_path, "slow-cc", f'sleep 600 >"{tmp_path}/alive" & wait')
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    ours = os.open(tmp_path / "alive", os.O_WRONLY)  # on a busy machine the compiler may not have started its child yet
    with pytest.raises(NoNative, match="did not end within its time"):
        build(environ, timeout_s=1.0)

    os.close(ours)
    hung_up = select.poll()
    hung_up.register(reader, 0)
    assert hung_up.poll(30_000), "a child has it open still"
    os.close(reader)
    assert libraries(environ) == []


def test_a_folder_writable_by_others_is_refused(environ: dict[str, str]) -> None:
    folder = library_folder(environ)
    folder.mkdir(parents=True)
    folder.chmod(0o770)

    with pytest.raises(NoNative, match="be writable only by its owner"):
        build({**environ, "CC": "true"})


def test_a_folder_that_is_a_link_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder = library_folder(environ)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tmp_path / "elsewhere")
    environ["CC"] = "true"

    with pytest.raises(NoNative, match="not be a link"):
        build(environ)


def test_a_cache_that_cannot_be_made_is_a_warning(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    environ["CC"] = "true"

    assert load(environ) is None
    assert "native_unavailable" in caplog.text


@needs_permissions
def test_a_cache_that_cannot_be_written_is_a_warning(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    environ["CC"] = "true"

    assert load(environ) is None
    assert "cannot be written" in caplog.text


@needs_compiler
def test_of_concurrent_starts_one_builds(environ: dict[str, str], tmp_path: Path, quick_cc: str) -> None:
    os.mkfifo(tmp_path / "go")
    held = f'case "$*" in *" -shared "*) ;; *) read line <"{tmp_path}/go";; esac'
    environ["CC"] = script(tmp_path, "held-cc", f'{held}; exec {quick_cc} "$@"')

    processes = [subprocess.Popen(BUILD, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    (tmp_path / "go").write_text("go\n")  # waits until one has begun to compile
    answers = [process.communicate(timeout=300)[0] for process in processes]

    assert [process.returncode for process in processes] == [0] * 4
    assert [[answer.strip()] for answer in answers] == [libraries(environ)] * 4
    assert (tmp_path / "log").read_text() == "built\n"
    assert len(libraries(environ)) == 1


@needs_compiler
def test_leftovers_of_a_killed_build_are_removed(environ: dict[str, str], quick_cc: str) -> None:
    environ["CC"] = quick_cc
    library_folder(environ).mkdir(parents=True, mode=0o700)
    (library_folder(environ) / "draft-move-1.so").write_bytes(b"half")

    path = build(environ).path

    assert libraries(environ) == [path.name]


def test_a_builder_that_never_ends_is_not_waited_for_forever(environ: dict[str, str]) -> None:
    environ["CC"] = "true"
    with (
        building(library_folder(environ), "move", time.monotonic() + 300),
        pytest.raises(NoNative, match="another process has been building move"),
    ):
        build(environ, timeout_s=0.0)


def install_step(environ: dict[str, str], *limit_s: float) -> "subprocess.CompletedProcess[str]":
    code = "import sys; sys.path.insert(0, sys.argv[1]); from native.build import main; "
    code += "sys.exit(main(*map(float, sys.argv[2:])))"
    command = [sys.executable, "-P", "-c", code, BUILD[-1], *map(str, limit_s)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
@needs_compiler
def test_the_install_step_builds_every_library(environ: dict[str, str]) -> None:
    done, again = install_step(environ), install_step(environ)

    assert done.returncode == 0, done.stderr
    assert {"engine", "move", "ranks"} <= {name.split("-")[0] for name in libraries(environ)}
    assert done.stderr.splitlines()[1].startswith(f"native: building ranks, 2 of {len(RECIPES)}, in ")
    assert (again.returncode, again.stderr) == (0, "")


def test_the_install_step_prints_the_reason_for_no_build(environ: dict[str, str]) -> None:
    environ["CC"] = "false"

    done = install_step(environ)

    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert first == f"native: building move, 1 of {len(RECIPES)}, in at most 600 s"
    assert last.startswith("native: not built, Python does the work: ")


def test_the_install_step_ends_at_its_limit(environ: dict[str, str], tmp_path: Path) -> None:
    environ["CC"] = script(tmp_path, "slow-cc", "exec sleep 600")

    done = install_step(environ, 0.5)

    assert done.returncode == 1
    assert "slow-cc did not end within its time" in done.stderr
