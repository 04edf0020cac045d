"""The benchmark of images: how it reads late turns and gaps, and that it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import images
from benchmarks.loop_lag.read import longest_turn_ms, recording

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "images.py"
_LATE = (
    "import asyncio, time\nasync def main():\n await asyncio.sleep(0)\n time.sleep(0.1)\n await asyncio.sleep(0.02)\n"
)


def test_a_gap_counts_if_it_overlaps_the_burst() -> None:
    assert images.longest_gap([0.0, 5.0, 6.0, 8.0, 20.0], (5.5, 7.0)) == 2.0


def test_a_turn_is_the_longest_within_its_spans(tmp_path: Path) -> None:
    lines = ["1.0 0.9 0.1 0.8", "2.0 0.05 0.01 0.004", "2.5 0.03 0.0 0.006"]
    (tmp_path / "7.txt").write_text("\n".join(lines))

    assert longest_turn_ms(tmp_path, 7, [(1.5, 3.0)]) == {"cpu": 6.0, "without_waits": 40.0, "whole": 50.0}
    assert longest_turn_ms(tmp_path, 8, [(1.5, 3.0)]) == {"cpu": 0.0, "without_waits": 0.0, "whole": 0.0}


def test_a_loop_is_recorded_in_its_process(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", f"{_LATE}asyncio.run(main())"]
    with subprocess.Popen(command, env=recording(tmp_path)) as process:
        assert process.wait(60) == 0

    assert longest_turn_ms(tmp_path, process.pid, [(0.0, float("inf"))])["whole"] > 50


@pytest.mark.long
@pytest.mark.cluster
def test_both_bursts_run_beside_streams(tmp_path: Path) -> None:
    sizes = ["--shape", "tiny", "--rounds", "1", "--images", "2", "--side", "64", "--streams", "2"]
    command = [sys.executable, str(SCRIPT), *sizes, "--flags", "--kv-cache-memory 64MiB", "--folder", str(tmp_path)]

    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            output, errors = running.communicate(timeout=300)
        finally:
            running.terminate()  # it stops what it started; killing it would leave a cluster behind

    assert running.returncode == 0, errors
    row = json.loads(output.splitlines()[0])
    assert min(row["gap_p99_images_ms"], row["gap_p99_text_ms"], row["burst_images_s"]) > 0
    assert set(row["turns_ms"]) == {"prefill-0", "decode-0", "scheduler"}
    assert 0 <= row["overlap"] <= 1
