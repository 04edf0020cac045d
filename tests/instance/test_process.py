"""An instance as a process: SIGTERM ends it with status 0, also where native code cannot be interrupted."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instance import local, process
from telemetry.start_marks import StartMarks
from wire.errors import InstanceLost

WAIT_S = 300.0  # long enough for a process to start on a busy machine
PROCESS = """
import atexit, sys, time
from pathlib import Path
from instance import process
from instance.config import InstanceConfig
from flags.options import EngineOptions
from wire.types import Role

def load_for_ever(config, on_lost, on_stage):
    print("loading", flush=True)
    time.sleep(3600)

class Said:
    async def serve(self, service):
        await serve(self, service)
        print("serving", flush=True)

if sys.argv[2] == "loading":
    process.build_engine = load_for_ever
serve = process.GrpcServer.serve
process.GrpcServer.serve = Said.serve
atexit.register(print, "the interpreter was taken down", flush=True)
options = EngineOptions(model=sys.argv[1], engine="fake", host="127.0.0.1", port=0)
sys.exit(process.run(InstanceConfig(options, Role.COMBINED, table_digest=sys.argv[1])))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
@pytest.mark.parametrize(("moment", "taken_down"), [("loading", False), ("serving", True)])
def test_a_signal_ends_a_process_with_status_zero(
    moment: str, taken_down: bool, number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PROCESS, str(tmp_path), moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == f"{moment}\n"
            process.send_signal(number)
            output, wrong = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()

    assert process.returncode == 0, wrong
    assert "Traceback" not in wrong
    # with a thread in native code, finalizing the interpreter would abort the process
    assert ("taken down" in output) is taken_down


LOST = """
import atexit, sys
from engine.core import EngineCore
from testing.engine.fake_model import FakeModel
from engine.watched import DeviceWatch, WatchedModel
from instance import process
from instance.config import InstanceConfig
from pdserve.guarded import guarded
from tests.devices.dying_device import DyingDevice
from tests.engine.fake_engines import CONFIG, prompt
from flags.options import EngineOptions
from wire.types import Role

class Dying(FakeModel):
    def launch(self, *step):
        device.fails_with = RuntimeError("device lost") if sys.argv[2] == "fails" else None
        device.answers.clear()
        raise RuntimeError("the step failed")

def build(config, on_lost, on_stage):
    model = WatchedModel(Dying(CONFIG), DeviceWatch(device, on_lost, 0.2))
    return EngineCore(model, max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_size=32), ()

class WithPrompt:
    async def serve(self, host):
        await serve(self, host)
        host.loop.post(lambda engine: engine.add(prompt("p", 3)))

device = DyingDevice()
process.build_engine = build
serve = process.GrpcServer.serve
process.GrpcServer.serve = WithPrompt.serve
atexit.register(print, "the interpreter was taken down", flush=True)
options = EngineOptions(model=sys.argv[1], engine="fake", host="127.0.0.1", port=0)
config = InstanceConfig(options, Role.COMBINED, table_digest=sys.argv[1])
sys.exit(guarded("instance", lambda: process.run(config)))
"""


@pytest.mark.parametrize(
    ("how", "why", "taken_down"),
    [
        pytest.param("fails", "fails a small test op: RuntimeError: device lost", True, marks=pytest.mark.long),
        ("hangs", "did not finish a small test op within 0.2 s", False),
    ],
)
def test_the_loss_of_its_device_ends_a_process_with_status_one(
    how: str, why: str, taken_down: bool, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", LOST, str(tmp_path), how]

    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=Path(__file__).parents[2])

    words = f"fake:0 {why} (after RuntimeError: the step failed); without it this instance cannot continue"
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].removeprefix("instance: ") == words
    assert ("taken down" in done.stdout) is taken_down


def test_a_port_range_without_a_free_port_ends_it_with_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--engine", "fake", "--model", str(tmp_path), "--kv-port-range", f"{port}-{port}"]
        command = [sys.executable, "-P", "-m", "pdserve.combined", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)

    assert done.returncode == 2
    *logged, last = done.stderr.splitlines()
    assert last == f"pdserve.combined: no port of {port}-{port} on 127.0.0.1 is free for KV"
    assert all(" INFO pdserve." in line for line in logged), done.stderr


@pytest.mark.parametrize("failure", [None, RuntimeError("no such model")])
def test_a_load_that_outlives_the_event_loop_ends_without_errors(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM came meanwhile."""
    loading, resume, broken = threading.Event(), threading.Event(), list[object]()
    config: Any = None

    def build(*_: object) -> object:
        loading.set()
        assert resume.wait(WAIT_S)
        if failure is not None:
            raise failure
        return None, ()

    async def stop_while_it_loads() -> object:
        shutdown = process._Shutdown()
        stopping = asyncio.create_task(asyncio.to_thread(loading.wait, WAIT_S))
        stopping.add_done_callback(lambda _: shutdown.stop.set())
        return await process._load_unless_stopped(config, shutdown, StartMarks())

    monkeypatch.setattr(process, "build_engine", build)
    monkeypatch.setattr(threading, "excepthook", broken.append)
    assert asyncio.run(stop_while_it_loads()) is None
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "load"]
    resume.set()
    thread.join(WAIT_S)

    assert not thread.is_alive()
    assert broken == []


@pytest.mark.parametrize("module", [process, local], ids=["instance", "pdserve serve"])
def test_a_rank_lost_in_a_load_that_never_returns_ends_the_process(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while graphs are captured: rank 0's thread then waits on its device for the other ranks."""
    resume = threading.Event()

    def build(config: object, on_lost: Callable[[InstanceLost], None], *_: object) -> object:
        on_lost(InstanceLost("rank 1 is gone"))
        assert resume.wait(WAIT_S)
        return None, ()

    async def load() -> object:
        config: Any = None
        if module is local:
            return await local.LocalInstance.start(config)
        return await process._load_unless_stopped(config, process._Shutdown(), StartMarks())

    monkeypatch.setattr(module, "build_engine", build)
    with pytest.raises(InstanceLost, match="rank 1 is gone"):
        asyncio.run(load())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "load"]
    resume.set()
    thread.join(WAIT_S)

    assert not thread.is_alive()


def test_a_loss_after_the_event_loop_has_closed_is_harmless() -> None:
    async def begin() -> process._Shutdown:
        return process._Shutdown()

    shutdown = asyncio.run(begin())

    shutdown.lost(InstanceLost("rank 1 is gone"))

    assert str(shutdown.error) == "rank 1 is gone"
