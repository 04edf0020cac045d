"""An instance as a process: SIGTERM ends it with status 0, also where native code cannot be interrupted."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.instance.pair import DEADLINE_S

PROCESS = """
import atexit, sys, time
from pathlib import Path
from instance import process
from instance.config import InstanceConfig
from wire.options import EngineOptions
from wire.types import Role

def load_for_ever(config):
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("moment", "taken_down"), [("loading", False), ("serving", True)])
def test_a_signal_ends_it_with_status_zero(
    moment: str, taken_down: bool, number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PROCESS, str(tmp_path), moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == f"{moment}\n"
            process.send_signal(number)
            said, wrong = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()

    assert process.returncode == 0, wrong
    assert "Traceback" not in wrong
    # with a thread in native code, taking the interpreter down is what aborts the process
    assert ("taken down" in said) is taken_down
