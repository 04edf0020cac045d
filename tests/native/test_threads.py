"""Teams of threads: every thread takes part, barriers hold, sleeping threads wake, a fork or an exit never hangs."""

import ctypes
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoints.dtypes import read_cpu_flags
from native.compiler import find_compiler
from native.engine_library import EngineLibrary, Threads, build_engine
from native.recipe import FOLDER

Region = Callable[[int, int], None]
_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
_LARGE = bytes(1 << 20)
_EXIT = """
import sys; sys.path.insert(0, sys.argv[1])
from native.engine_library import build_engine
team = build_engine().threads(4)
print("made")
"""
_FORK = """
import ctypes, os, sys; sys.path.insert(0, sys.argv[1])
from native.engine_library import build_engine
REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
seen = []
region = REGION(lambda _, thread, count: seen.append((thread, count)))
team = build_engine().threads(3)
run = team.library.functions.threads_run
run.argtypes = (ctypes.c_void_p, REGION, ctypes.c_void_p)
run(team.address, region, None)
seen.clear()
child = ctypes.PyDLL(None).fork()  # os.fork warns of threads, which is the point here
if child == 0:
    run(team.address, region, None)
    print(seen)
    team.close()
    print("closed", flush=True)
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def library(native_libraries: None) -> EngineLibrary:
    return build_engine()


def run(team: Threads, region: Region, *, share: bool = False) -> None:
    """Run a Python function in every thread."""
    function = team.library.functions.threads_share if share else team.library.functions.threads_run
    function.argtypes = (ctypes.c_void_p, _REGION, ctypes.c_void_p)
    function.restype = None
    function(team.address, _REGION(lambda _, thread, count: region(thread, count)), None)


def barrier(team: Threads, count: int) -> None:
    team.library.functions.threads_barrier.argtypes = (ctypes.c_void_p, ctypes.c_int)
    team.library.functions.threads_barrier(team.address, count)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_thread_runs_every_region(library: EngineLibrary, count: int) -> None:
    with library.threads(count) as team:
        for _ in range(50):
            seen: list[tuple[int, int]] = []

            run(team, lambda thread, total, seen=seen: seen.append((thread, total)))  # type: ignore[misc]

            assert sorted(seen) == [(thread, count) for thread in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_thread_passes_a_barrier_before_all_arrive(library: EngineLibrary, count: int) -> None:
    arrived: list[int] = []
    counts_seen: list[int] = []

    def region(thread: int, total: int) -> None:
        for round_number in range(1, 11):
            arrived.append(thread)
            barrier(team, total)
            counts_seen.append(len(arrived) - round_number * total)
            barrier(team, total)

    with library.threads(count) as team:
        run(team, region)

    assert counts_seen == [0] * 10 * count


def test_threads_that_sleep_wake_up(library: EngineLibrary) -> None:
    others = set(os.listdir("/proc/self/task"))
    with library.threads(3) as team:
        run(team, lambda _, __: None)
        _wait_until_asleep(set(os.listdir("/proc/self/task")) - others)
        seen: list[int] = []

        run(team, lambda thread, _: seen.append(thread))

        assert sorted(seen) == [0, 1, 2]


def _wait_until_asleep(tasks: set[str]) -> None:
    """Return when all these threads of the process are asleep."""
    deadline = time.monotonic() + 300
    while "R" in map(_state, tasks):
        assert time.monotonic() < deadline, "a thread never sleeps"


def _state(task: str) -> str:
    try:
        return Path(f"/proc/self/task/{task}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone"


def test_shared_work_is_done_by_any_thread(library: EngineLibrary) -> None:
    with library.threads(4) as team:
        for _ in range(50):
            work = list(range(20))
            done: list[int] = []

            def region(thread: int, _: int, work: list[int] = work, done: list[int] = done) -> None:
                while work:
                    try:
                        done.append(work.pop())
                    except IndexError:
                        return

            run(team, region, share=True)

            assert sorted(done) == list(range(20))


@pytest.mark.parametrize("count", [1, 2])
def test_callers_take_turns(library: EngineLibrary, count: int) -> None:
    inside: list[int] = []
    peak: list[int] = []

    def region(thread: int, total: int) -> None:
        if thread == 0:
            inside.append(1)
            hashlib.sha256(_LARGE)  # releases the GIL for a while
            peak.append(len(inside))
        barrier(team, total)
        if thread == 0:
            inside.pop()

    def run_often() -> None:
        for _ in range(10):
            run(team, region)

    with library.threads(count) as team:
        callers = [threading.Thread(target=run_often) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(300)

    assert peak == [1] * 30


def test_closing_waits_for_the_running_region(library: EngineLibrary) -> None:
    team, inside, ended = library.threads(3), threading.Event(), []

    def region(thread: int, count: int) -> None:
        inside.set()
        barrier(team, count)
        ended.append(thread)

    caller = threading.Thread(target=run, args=(team, region))
    address = team.address
    caller.start()
    assert inside.wait(300)
    library.functions.threads_close(address)

    assert sorted(ended) == [0, 1, 2]
    caller.join(300)
    team._address = None


def test_barriers_survive_counter_wrap_and_stop_spinning(tmp_path: Path) -> None:
    *complaints, spun_ns = _alone(tmp_path).splitlines()
    half_in_vain, tenth_in_vain, hundredth_in_vain = map(int, spun_ns.split())

    assert complaints == []
    assert half_in_vain < 2_000 < tenth_in_vain < 12_000 < 40_000 < hundredth_in_vain <= 50_000


def _alone(folder: Path) -> str:
    """Return the output of threads_alone.c."""
    compiler = find_compiler(os.environ)
    if compiler is None:
        pytest.skip("missing tool: a C compiler")
    source, program = Path(__file__).with_name("threads_alone.c"), folder / "alone"
    strict = ["-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    command = [*compiler.command, "-std=c11", *strict, "-pthread", "-I", str(FOLDER), "-o", str(program), str(source)]
    subprocess.run(command, check=True, timeout=300)
    return subprocess.run([program], check=True, timeout=300, capture_output=True, text=True).stdout


def test_a_forked_child_works_alone() -> None:
    assert _python(_FORK) == "[(0, 1)]\nclosed\n"


def test_a_process_can_exit_with_an_open_team() -> None:
    assert _python(_EXIT) == "made\n"


def _python(code: str) -> str:
    """Return the output of a program that must exit with 0."""
    command = [sys.executable, "-P", "-c", code, str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("count", [0, -1, 257])
def test_an_invalid_number_of_threads_is_refused(library: EngineLibrary, count: int) -> None:
    with pytest.raises(ValueError, match=f"the number of threads is {count}, but must be from 1 to 256"):
        library.threads(count)


def test_a_team_uses_the_fastest_kernels_by_default(library: EngineLibrary) -> None:
    """AVX512-BF16 is slower than float32 on Intel's cores that have AMX, where the system hides AMX."""
    flags = read_cpu_flags()
    is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    is_slow = is_intel and "avx512_fp16" in flags and not {"amx_bf16", "amx_tile"} <= flags

    with library.threads(1) as best, library.threads(1, isa=library.isas[-1]) as last:
        assert best.isa == ("avx512" if is_slow and last.isa == "avx512_bf16" else last.isa)


def test_an_unknown_instruction_set_is_refused(library: EngineLibrary) -> None:
    with pytest.raises(ValueError, match="instructions mmx are not among plain"):
        library.threads(1, isa="mmx")


def test_a_closed_team_raises(library: EngineLibrary) -> None:
    team = library.threads(2)
    team.close()
    team.close()

    with pytest.raises(ValueError, match="the team of threads is closed"):
        _ = team.address
