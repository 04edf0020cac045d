"""`pdserve verify --features` on a tiny model: every feature is equal in every way of serving."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(500)]


def _verify(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "pdserve", "verify", "--features", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=450)


@pytest.mark.long
def test_every_feature_is_equal_combined_over_shm_and_tcp_and_after_preemption(tiny_model: Path) -> None:
    done = _verify("--model", str(tiny_model), "--max-tokens", "40")

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    header = next(line for line in lines if line.startswith("feature "))
    assert header.split("  ")[-1].strip() == "after preemption"
    assert all(way in header for way in ("combined", "P/D shm", "P/D tcp"))
    assert lines[-1].startswith("equal: ")
    assert "Traceback" not in done.stderr


def test_what_it_started_ends_with_it_on_sigterm(tiny_model: Path) -> None:
    command = [sys.executable, "-P", "-m", "pdserve", "verify", "--model", str(tiny_model), "--transport", "shm"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    ) as verify:  # fmt: skip
        deadline = time.monotonic() + 60
        while len(started := psutil.Process(verify.pid).children(recursive=True)) < 2:
            assert time.monotonic() < deadline
        verify.send_signal(signal.SIGTERM)

        assert verify.wait(60) == 130
    assert [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


def test_features_are_exact_and_so_for_float32_alone(tiny_model: Path) -> None:
    done = _verify("--model", str(tiny_model), "--dtype", "bfloat16")

    assert done.returncode == 2
    assert done.stderr.strip().endswith("--features is exact, and so for --dtype float32 alone, not bfloat16")
