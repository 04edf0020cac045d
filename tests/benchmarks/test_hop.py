"""The hop benchmark: its arithmetic, and that it runs with the fake engine."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import hop

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "hop.py"


def test_the_hop_is_the_delay_of_the_second_token_over_the_first() -> None:
    times = {"pd": [(1.0, 1.2), (1.0, 1.3)], "combined": [(1.0, 1.1), (2.0, 2.1)]}

    row = hop.summary(512, times, argparse.Namespace(runs=2, chunk=512))

    assert row["hop"] == pytest.approx(((1.2 - 1.1) / 1.0 + (1.3 - 2.1) / 2.0) / 2, abs=1e-4)
    assert row["gap"] == pytest.approx((0.1 / 1.0 + 0.2 / 2.0) / 2, abs=1e-4)
    assert row["met"]


@pytest.mark.long
@pytest.mark.cluster
def test_both_sides_start_answer_and_end(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--engine", "fake", "--prompt-tokens", "64", "--runs", "2"]

    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            output, errors = running.communicate(timeout=300)
        finally:
            running.terminate()  # it stops what it started; killing it would leave a cluster behind

    assert running.returncode == 0, errors
    row = json.loads(output.splitlines()[0])
    assert row["first_token_pd_ms"] > 0
    assert row["second_token_combined_ms"] > 0
    assert min(row["token_gap_p50_alone_ms"], row["token_gap_p99_kv_ms"], row["handed_bytes"]) > 0
