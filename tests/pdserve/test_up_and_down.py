"""`up` ended while it starts its processes, or before: by `down`, or by a signal at the worst moment."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.run_folder import RunFolder, start_time
from tests.engine.tiny_models import save_tiny_tokenizer

# `up` until it creates its tables, which takes long while Ray has no room or a disk is slow.
_LAYS_OUT = """
import signal, sys
from pdserve import up
from pdserve.guarded import guarded
from pdserve.site import LocalSite
from pdserve.up_options import UpOptions
from flags.options import EngineOptions

def plans(self):
    print("laying out", flush=True)
    signal.pause()

LocalSite.plans = plans
up.parse = lambda argv: up.UpRequest(UpOptions(detach="detach" in argv), EngineOptions(model="m"), 60.0, 30.0, ())
up.check_model = up.check_kv_room = lambda *args, **more: None
sys.exit(guarded("pdserve up", lambda: up.main(sys.argv[1:])))
"""


@pytest.mark.parametrize(("words", "status"), [((), 143), (("detach",), 1)])
def test_down_ends_an_up_that_still_creates_its_tables(
    words: tuple[str, ...], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _LAYS_OUT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PDSERVE_RUN_DIR": str(tmp_path)},
    ) as up:  # fmt: skip
        assert up.stdout is not None
        try:
            assert up.stdout.readline() == "laying out\n"
            assert cli.main(["down", "--run-dir", str(tmp_path)]) == 0
            output, _ = up.communicate(timeout=300)
        finally:
            up.send_signal(signal.SIGKILL)

    assert capsys.readouterr().out == "stopped a cluster that was starting\n"
    assert (output, up.returncode) == ("stopping\n", status)
    assert RunFolder(tmp_path).read() is None


def test_down_removes_nothing_of_an_up_that_holds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pdserve.down.DEFAULT_URL", "http://127.0.0.1:1")
    folder = RunFolder(tmp_path)
    with folder.lock():  # it starts just after `down` has found nothing running
        folder.tables.mkdir()
        assert cli.main(["down", "--run-dir", str(tmp_path)]) == 0

        assert folder.tables.exists()
    assert capsys.readouterr().out == "no cluster is running here\n"


@pytest.mark.parametrize(
    ("flag", "words"),
    [("--prefil=2", "did you mean --prefill"), ("--model=/nope", "/nope"), ("--port={}", "in use by another process")],
)
def test_a_refused_up_creates_no_run_folder(
    flag: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 320, "max_position_embeddings": 512}')
    save_tiny_tokenizer(tmp_path)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with socket.create_server(("127.0.0.1", 0)) as busy:
        typed = flag.format(busy.getsockname()[1])
        flags = (f"--model={tmp_path}", "--engine=fake", typed, f"--run-dir={tmp_path / 'run'}")
        assert cli.main(["up", *flags]) == 2

    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


# One process that does not watch its parent exists; the code that starts it does not know it yet.
_STARTS = """
import os, signal, subprocess, sys
from pdserve import up
from pdserve.guarded import guarded
from pdserve.process_plan import ProcessPlan
from pdserve.site import LocalSite
from pdserve.up_options import UpOptions
from flags.options import EngineOptions

start = subprocess.Popen.__init__

def started(popen, *args, **more):
    start(popen, *args, **more)
    print(popen.pid, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

code = "import signal; signal.pause()"
plan = ProcessPlan("prefill-0", "prefill", "127.0.0.1:1", (sys.executable, "-S", "-c", code), {})
subprocess.Popen.__init__ = started
LocalSite.plans = lambda site: [plan]
up.parse = lambda argv: up.UpRequest(UpOptions(), EngineOptions(model="m"), 60.0, 30.0, ())
up.check_model = up.check_kv_room = lambda *args, **more: None
sys.exit(guarded("pdserve up", lambda: up.main([])))
"""


def test_a_process_started_during_a_signal_is_ended_too(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _STARTS], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PDSERVE_RUN_DIR": str(tmp_path)},
    ) as up:  # fmt: skip
        assert up.stdout is not None
        pid = int(up.stdout.readline())
        output = up.stdout.read()  # not by communicate, which does not see what came with the first line
        up.wait(300)
    is_left = start_time(pid) is not None
    if is_left:
        os.kill(pid, signal.SIGKILL)

    assert (output, up.returncode) == ("stopping\n", 143)
    assert not is_left
