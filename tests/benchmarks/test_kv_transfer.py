"""The KV benchmark runs, verifies the bytes it moves, and names what it could not measure. No figure is judged here."""

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kv.rounds import Cache, in_turn, ratio_of
from benchmarks.kv.shapes import block_table, shape_named
from benchmarks.kv.table import Row, markdown

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "kv_transfer.py"


def run(tmp_path: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """Run the script where no peer is installed; return its output and its rows."""
    (tmp_path / "bin").mkdir()
    env = {**os.environ, "PEERS_HOME": str(tmp_path / "none"), "PATH": str(tmp_path / "bin")}
    command = [sys.executable, str(SCRIPT), "--quick", "--sizes", "1", "--rounds", "1", *arguments]
    report = tmp_path / "rows.json"
    ran = subprocess.run(
        [*command, "--json", str(report)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, json.loads(report.read_text())["rows"] if report.exists() else []


@pytest.mark.long
def test_a_quick_run_compares_with_a_copy_and_names_missing_peers(tmp_path: Path) -> None:
    output, rows = run(tmp_path, "--transports", "shm", "--parts", "speed", "many", "small")

    copies = [row for row in rows if row["peer_name"] == "plain copy"]
    assert copies
    assert all(row["ours"] > 0 and row["ratio"] > 0 for row in copies)
    (missing,) = [row for row in rows if row["peer_name"].startswith("NIXL")]
    assert "benchmarks/peers/setup nixl" in missing["skipped"]
    assert any("64 hand-offs" in row["measure"] and row["ratio"] > 0 for row in rows)
    assert any("fake pool" in row["measure"] and row["ours"] > 0 for row in rows)
    assert "| measure" in output


@pytest.mark.long
def test_a_missing_transport_is_a_row_and_does_not_end_the_run(tmp_path: Path) -> None:
    _, rows = run(tmp_path, "--transports", "pigeon", "shm", "--parts", "scattered")

    assert "pigeon" in rows[0]["skipped"]
    assert any(row["measure"].startswith("shm") and row["ratio"] > 0 for row in rows)


@pytest.mark.long
def test_a_profile_shows_both_sides(tmp_path: Path) -> None:
    output, _ = run(tmp_path, "--transports", "tcp", "--profile")

    assert "P kv-out" in output or "   P " in output
    assert "   D " in output


@pytest.mark.long
@pytest.mark.cluster
def test_pairs_and_whole_instances_are_measured(tmp_path: Path) -> None:
    _, rows = run(tmp_path, "--transports", "tcp", "--parts", "pairs", "whole")

    assert [bool(row["skipped"]) for row in rows] == [False] * 3


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 4096])
def test_no_scattered_block_follows_its_predecessor(count: int) -> None:
    blocks = block_table(count + 5, 5, count, scattered=True)

    assert sorted(blocks) == list(range(5, 5 + count))
    assert all(b != a + 1 for a, b in itertools.pairwise(blocks))


def test_the_default_shape_has_6_kib_per_block_of_a_tensor() -> None:
    shape = shape_named("default")

    assert (shape.num_layers, 16 * shape.tensors[0].token_bytes) == (30, 6 << 10)


def test_contestants_take_turns_and_ratios_are_per_round() -> None:
    order: list[str] = []
    figures = {"ours": iter([1.0, 4.0, 2.0]), "peer": iter([2.0, 4.0, 1.0])}

    def contestant(name: str) -> float:
        order.append(name)
        return next(figures[name])

    turns = {name: functools.partial(contestant, name) for name in figures}
    seconds = in_turn(turns, 3, Cache(1 << 20))

    assert order == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert ratio_of(seconds["ours"], seconds["peer"]) == 1.0


def test_a_goal_is_judged_by_the_ratio_or_by_our_time_alone() -> None:
    slow = Row("a", ours=1.0, peer_name="copy", peer=2.0, ratio=0.5, goal=0.8)
    quick = Row("b", "ms", ours=1.5, goal=2.0, at_least=False)
    bare = Row("c", ours=1.0, peer_name="copy", peer=2.0, ratio=0.5)

    assert [slow.met, quick.met, bare.met] == [False, True, None]
    assert "<= 2 ms" in markdown([slow, quick, bare])
