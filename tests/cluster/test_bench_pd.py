"""`pdserve bench pd` as a user types it: it compares, and leaves no process behind, however it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster import fake_vllm
from tests.kvtransfer.rig import until

pytestmark = [pytest.mark.cluster, pytest.mark.long]

FIGURES = ("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "longest_gap_p99_ms", "output_tokens_per_s")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The folder that takes the place of /tmp for what the bench keeps."""
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def command(model: Path, *flags: str) -> list[str]:
    engine = ("--model", str(model), "--engine", "fake")
    return [sys.executable, "-P", "-m", "pdserve", "bench", "pd", "--quick", *engine, *flags]


def env(work: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(work)}


def children_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.fixture
def running(fake_model: Path, work: Path) -> Iterator["subprocess.Popen[str]"]:
    """One whose colocated processes have all started."""
    process = subprocess.Popen(
        command(fake_model), env=env(work), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        until_said = iter(process.stderr.readline, "")
        assert any("colocated: starting" in line for line in until_said)
        until(lambda: len(children_of(process.pid)) >= 5)  # three processes and the guards of two
        yield process
    finally:
        process.kill()
        process.communicate()


def test_five_contestants_are_compared(fake_model: Path, work: Path, tmp_path: Path) -> None:
    binary, figures = tmp_path / "vllm", tmp_path / "pd.json"
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_vllm.__file__} "$@"\n')
    binary.chmod(0o755)

    done = subprocess.run(
        command(fake_model, "--vllm", str(binary), "--json", str(figures)), env=env(work), capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    contestants = ["P/D", "P/D --path auto", "colocated", "vLLM P/D", "vLLM colocated"]
    assert [one["contestant"] for one in found["outcomes"]] == [name for name in contestants for _ in range(5)]
    assert all(one["failed"] == 0 and all(one[key] > 0 for key in FIGURES) for one in found["outcomes"])
    pair, colocated = found["outcomes"][1]["use"], found["outcomes"][11]["use"]
    assert pair["busy"].keys() == {"prefill-0", "decode-0"}
    assert 0 < pair["hops"] <= 8
    assert colocated["busy"].keys() == {"combined-0", "combined-1"}
    assert all(share > 0 for share in colocated["busy"].values())
    table = done.stdout.splitlines()
    assert " ".join(table[0].split()) == f"load figure {' '.join(contestants)} best"
    assert any(line.startswith("P/D wins ") for line in table)
    assert any(line.startswith("P/D against vLLM P/D: better in ") for line in table)
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_however_it_ends_its_processes_end_too(
    running: "subprocess.Popen[str]", work: Path, number: signal.Signals, status: int
) -> None:
    started = children_of(running.pid)

    running.send_signal(number)
    output, errors = running.communicate(timeout=300)

    assert running.returncode == status, errors
    _, left = psutil.wait_procs(started, 30)
    assert not left
    if number != signal.SIGKILL:
        assert "Traceback" not in errors
        assert output.startswith("load ")  # what was measured of the pair
        assert list(work.iterdir()) == []
