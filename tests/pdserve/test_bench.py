"""`pdserve bench engine` measures every row of a tiny model, and refuses with a message what cannot be measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.loader import load_model
from pdserve.bench import main, python_time
from pdserve.bench.cases import BenchCase, BenchRun, Times, all_cases, goals
from pdserve.bench.engine import chosen, parse, row, table, timed
from pdserve.bench.floors import Floors
from pdserve.bench.python_time import CASES, python_ms
from pdserve.bench.vllm import PeerMissing, Vllm
from tests.engine.tiny_models import make_tiny_model
from wire.errors import ConfigError


@pytest.mark.long
def test_a_row_is_measured_beside_its_floor(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "tiny")
    command = [
        sys.executable, "-P", "-m", "pdserve", "bench", "engine", "--model", str(model), "--only", "batch 1",
        "--repeats", "1", "--dtype", "float32",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    (row,) = [line for line in lines if line["measure"] == "decode, batch 1"]
    assert row["tokens_per_s"] > 0
    assert row["fraction"] > 0
    assert done.stdout.splitlines()[-1].startswith("| decode, batch 1 | ")
    assert lines[0]["cpu"]


@pytest.mark.usefixtures("native_libraries")
@pytest.mark.parametrize("name", CASES)
def test_python_time_is_measured_without_native_time(name: str, tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "tiny")
    model = load_model(path, dtype="float32", block_size=16, kv_cache_memory=1 << 24, num_threads=1).model
    if model._fused is None:
        pytest.skip("there are no native kernels")
    weights = model._fused._weights

    assert python_ms(model, CASES[name], batch=4) > 0
    assert model._fused._weights is weights
    model.close()


def test_the_decode_rate_leaves_out_the_prefills_time() -> None:
    case = BenchCase("decode, batch 2", BenchRun(2, 256, 64), BenchRun(2, 256, 1))
    times = Times()
    for run, seconds in ((case.run, 3.0), (case.run, 5.0), (case.run, 4.0), (BenchRun(2, 256, 1), 1.0)):
        times.add(run, seconds)

    assert times.case_s(case) == 3.0
    assert times.rate(case) == 2 * 63 / 3.0


def test_an_implausible_rate_of_a_disturbed_machine_is_none() -> None:
    case = BenchCase("decode, batch 8", BenchRun(8, 256, 64), BenchRun(8, 256, 1))
    times, quiet = Times(), Times()
    for one, seconds in ((times, 2.0), (quiet, 0.5)):
        one.add(case.run, 1.0)
        one.add(BenchRun(8, 256, 1), seconds)

    fields = row(case, times, quiet, Floors(1e3, 10.0, 1, 1, 1, 1), {8: [0.01]})

    assert (fields["tokens_per_s"], fields["fraction"], fields["ratio"]) == (None, None, None)
    assert fields["peer_tokens_per_s"] == 8 * 63 / 0.5
    assert "| decode, batch 8 | disturbed | disturbed |" in table([fields], with_peer=True)


class _Clocked:
    """Records what is timed."""

    def __init__(self) -> None:
        self.runs: list[BenchRun] = []

    def time(self, run: BenchRun) -> float:
        self.runs.append(run)
        return float(len(self.runs))


def test_a_row_is_finished_before_the_next_one_is_timed() -> None:
    ours, peer = _Clocked(), _Clocked()
    first, second = (
        BenchCase("prefill", BenchRun(1, 512, 1)),
        BenchCase("decode", BenchRun(1, 256, 64), BenchRun(1, 256, 1)),
    )
    times = (Times(), Times())

    cases = timed([first, second], [ours, peer], times, 2)

    assert (next(cases), ours.runs, peer.runs) == (first, [first.run] * 2, [first.run] * 2)
    assert (next(cases), ours.runs[2:]) == (second, [*second.runs, *second.runs])
    assert times[0].seconds[second.run] == [4.0, 6.0]


def test_the_floor_is_the_better_of_two_measurements() -> None:
    before, after = Floors(1e3, 10.0, 5, 6, 7, 8), Floors(5e2, 20.0, 5, 6, 7, 8)
    assert before.better(after) == after.better(before) == Floors(1e3, 20.0, 5, 6, 7, 8)


def test_rows_are_selected_by_parts_of_their_names() -> None:
    assert [case.measure for case in chosen(("batch 1", "4 x"))] == ["prefill 4 x 512", "decode, batch 1"]
    assert chosen(()) == list(all_cases())
    assert chosen(("Python",)) == []
    assert python_time.chosen(("batch 64, greedy",)) == ["greedy"]
    assert parse(["--only", "Python"]).only == ("Python",)
    assert parse(["--only", "batch 8", "512"]).only == ("batch 8", "512")


def test_every_row_has_a_goal_and_a_line_in_the_table() -> None:
    rows: list[dict[str, object]] = [
        {"measure": case.measure, "tokens_per_s": 10.0, "fraction": 0.5, "peer_tokens_per_s": 4.0, "ratio": 2.5,
         "goal": goals()[case.measure]}
        for case in all_cases()
    ]  # fmt: skip

    lines = table(rows, with_peer=True).splitlines()

    assert lines[0] == "| measure | pdserve, tok/s | of the floor | vLLM, tok/s | ratio | goal |"
    assert "| decode, batch 8 | 10 | 0.5 | 4 | 2.5 | 2 |" in lines
    assert len(lines) == 2 + len(all_cases())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--repeats", "0"], "--repeats is 0"),
        (["--only", "nothing"], "nothing matches none of: prefill 1 x 512"),
        (["--peer", "hal"], "hal"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_reason(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(argv)


def test_an_unknown_benchmark_is_refused_and_help_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[4:7]] == ["engine", "serve", "pd"]
    with pytest.raises(ConfigError, match="there is no benchmark 'moon', only engine, serve, pd"):
        main(["moon"])


def test_a_missing_peer_prints_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(PeerMissing, match="run benchmarks/peers/setup vllm"):
        Vllm(tmp_path, dtype="float32", environ={**os.environ, "PEERS_HOME": str(tmp_path)})
