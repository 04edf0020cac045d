"""The first signal ends a batch gracefully, the second at once."""

import signal
import subprocess
import sys

import pytest

_STUBBORN = """
import asyncio
from pdserve.batch_run.interruption import Interruption

async def work():
    while True:
        try:
            print("under way", flush=True)
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            print("cancelled", flush=True)
            {after}

with Interruption() as interruption:
    try:
        interruption.run(work())
    except KeyboardInterrupt:
        raise SystemExit(interruption.status)
"""
_BLOCKED = """
import time
from pdserve.batch_run.interruption import Interruption

with Interruption() as interruption:
    try:
        print("under way", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        print("cancelled", flush=True)
        raise SystemExit(interruption.status)
"""


def start(code: str) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "under way\n"
    return child


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("code", [_STUBBORN.format(after="raise"), _BLOCKED], ids=["on a loop", "without one"])
def test_the_first_signal_ends_it_gracefully(code: str, number: signal.Signals, status: int) -> None:
    child = start(code)

    child.send_signal(number)

    output = child.communicate(timeout=300)
    assert output == ("cancelled\n", "\nstopping; a second signal stops at once\n")
    assert child.returncode == status


@pytest.mark.parametrize("code", [_STUBBORN.format(after="raise"), _BLOCKED], ids=["on a loop", "without one"])
def test_a_reader_ended_by_the_same_ctrl_c_blocks_nothing(code: str) -> None:
    with start(code) as child:
        assert child.stderr is not None
        assert child.stdout is not None
        child.stderr.close()

        child.send_signal(signal.SIGINT)

        assert child.stdout.read() == "cancelled\n"
        assert child.wait(300) == 130


def test_work_that_does_not_end_is_ended_by_the_second_signal() -> None:
    child = start(_STUBBORN.format(after="pass"))
    assert child.stdout is not None

    child.send_signal(signal.SIGINT)
    messages = [child.stdout.readline() for _ in range(2)]
    child.send_signal(signal.SIGTERM)

    assert messages == ["cancelled\n", "under way\n"]
    assert child.communicate(timeout=300)[0] == ""
    assert child.returncode == 143
