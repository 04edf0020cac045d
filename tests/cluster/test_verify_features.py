"""`pdserve verify --features` on a tiny model: every feature is equal in every way of serving."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.cluster


_STOPS_NOBODY = """
import sys
from pdserve import feature_preemption, verify
feature_preemption.environment_of = lambda max_tokens: {}
sys.exit(verify.main(sys.argv[1:]))
"""


def _verify(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "pdserve", "verify", "--features", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=450)


@pytest.mark.long
def test_every_feature_is_equal_in_all_ways_and_after_preemption(tiny_model: Path) -> None:
    done = _verify("--model", str(tiny_model), "--max-tokens", "40")

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    header = next(line for line in lines if line.startswith("feature "))
    ways = ["combined", "P/D shm", "P/D tcp", "after preemption (swap)", "after preemption (rebuild)"]
    assert re.split("  +", header.strip()) == ["feature", *ways]
    left_out = {line.split(": ")[1].split(", after")[0] for line in lines if line.startswith("n/a: ")}
    assert left_out == {"embedding (last)", "embedding (mean)", "embedding (dimensions)", "score (cosine of vectors)"}
    assert lines[-1].startswith("equal: ")
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_features_never_preempted_are_not_reported_as_equal(tiny_model: Path) -> None:
    flags = ("--features", "--model", str(tiny_model), "--max-tokens", "24", "--transport", "shm")
    done = subprocess.run(
        [sys.executable, "-P", "-c", _STOPS_NOBODY, *flags], capture_output=True, text=True, timeout=450
    )

    lines = done.stdout.splitlines()
    unproven = [line for line in lines if re.search("after preemption .*was never preempted between two", line)]
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line for line in lines if line.startswith("WRONG")] == unproven
    assert len(unproven) > 24, done.stderr  # of 24 features in two ways: a tenth of the pool preempts all but a few
    assert lines[-1].startswith("not equal: ")


@pytest.mark.long
def test_on_sigterm_everything_that_it_started_ends(tiny_model: Path) -> None:
    command = [sys.executable, "-P", "-m", "pdserve", "verify", "--model", str(tiny_model), "--transport", "shm"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    ) as verify:  # fmt: skip
        deadline = time.monotonic() + 300
        while len(started := psutil.Process(verify.pid).children(recursive=True)) < 2:
            assert time.monotonic() < deadline
        verify.send_signal(signal.SIGTERM)

        assert verify.wait(300) == 130
    assert [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


def test_features_are_exact_and_in_float32_only(tiny_model: Path) -> None:
    done = _verify("--model", str(tiny_model), "--dtype", "bfloat16")

    assert done.returncode == 2
    assert done.stderr.strip().endswith("--features compares exactly and needs --dtype float32, not bfloat16")
