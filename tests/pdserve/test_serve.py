"""`pdserve serve` before it serves: it reports why its engine was lost, and ends at once by a signal."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import fake_model  # noqa: F401

pytestmark = pytest.mark.cluster

# The engine is lost after its load and before SIGTERM would end the server gracefully.
_LOST = """
import sys
from instance.local import LocalInstance
from pdserve.cli import main
from wire.errors import InstanceLost

start = LocalInstance.start

async def lost_at_once(config, on_lost):
    instance = await start(config, on_lost)
    on_lost(InstanceLost("the device computes no more"))
    return instance

LocalInstance.start = lost_at_once
sys.exit(main(["serve", sys.argv[1], "--engine", "fake", "--port", "0"]))
"""


@pytest.mark.long
def test_an_engine_lost_before_serving_ends_the_server(fake_model: Path) -> None:  # noqa: F811
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LOST, str(fake_model)], capture_output=True, text=True, timeout=300
    )

    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "pdserve serve: the device computes no more")


_LOADS = """
import sys, threading
from instance import local
from native import ticker
from pdserve.cli import main

def load(config, on_lost):
    print("loading, with a ticker:", ticker._ticker is not None, flush=True)
    threading.Event().wait()

local.build_engine = load
sys.exit(main(["serve", sys.argv[1], "--engine", "fake", "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_while_it_loads_ends_it_at_once(number: signal.Signals, fake_model: Path) -> None:  # noqa: F811
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _LOADS, str(fake_model)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "loading, with a ticker: True\n"
            server.send_signal(number)

            assert server.wait(300) == -number
        finally:
            server.kill()
