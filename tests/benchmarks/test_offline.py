"""The offline benchmark: its requests, its figures, and that it runs with the fake engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import offline
from tests.cluster.conftest import fake_model  # noqa: F401 - a fixture

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "offline.py"


def test_the_requests_are_within_bounds_and_the_same_every_time() -> None:
    requests = offline.workload(256, 0)

    assert requests == offline.workload(256, 0) != offline.workload(256, 1)
    assert {32 <= len(ids) <= 1024 and 16 <= count <= 128 for ids, count in requests} == {True}
    assert min(min(ids) for ids, _ in requests) >= 100


def test_rates_are_those_of_the_median_round() -> None:
    assert offline.rates([([1] * 30, 10), ([1] * 10, 10)], [9.0, 2.0, 1.0]) == {
        "seconds": 2.0, "in_tokens_per_s": 20.0, "out_tokens_per_s": 10.0, "tokens_per_s": 30.0,
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.cluster
def test_our_side_runs_from_any_folder(fake_model: Path, tmp_path: Path) -> None:  # noqa: F811
    config = fake_model / "config.json"
    (tmp_path / "model").mkdir()
    for file in fake_model.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2048})
    )
    flags = ["--requests", "3", "--rounds", "1", "--no-peer", "--engine", "fake", "--last-id", "320"]
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "model"), *flags], cwd=tmp_path, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    (row,) = map(json.loads, ended.stdout.splitlines())
    assert (row["side"], row["tokens_per_s"] > 0) == ("pdserve", True)
