"""The GPU benchmark without a GPU: its output, its parts on a tiny model, and its arithmetic."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.card import steps
from benchmarks.card.layers import measure_layers
from benchmarks.card.limits import H200_BYTES_S, H200_OPERATIONS_S, Limits
from benchmarks.card.rows import Row, markdown
from benchmarks.card.shapes import EIGHT_B, ONE_B, TINY
from benchmarks.card.steps import decode_row, measure_steps, prefill_row
from devices.cuda import CudaKind
from tests.devices.capturing_device import CapturingDevice

SCRIPT = Path(gpu.__file__)
_H200 = Limits("H200", H200_BYTES_S, H200_OPERATIONS_S, H200_BYTES_S / 2)


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaKind, "lacking", lambda self: "torch sees no GPU")


@pytest.mark.usefixtures("without_a_gpu")
def test_without_a_gpu_it_reports_that_and_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"

    assert gpu.main(["--json", str(file)]) == 0

    assert capsys.readouterr().out == "benchmarks/gpu.py: nothing is measured: torch sees no GPU\n"
    assert not file.exists()


@pytest.mark.long
def test_a_tiny_run_has_a_figure_for_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"

    arguments = ["--device", "cpu", "--tiny", "--parts", "limits", "steps", "peers", "--json", str(file)]
    assert gpu.main(arguments) == 0

    rows = json.loads(file.read_text())["rows"]
    who = {row["who"] for row in rows if row["value"]}
    assert who == {"torch", "pdserve", "transformers, eager", "transformers, sdpa"}
    assert all(row["value"] > 0 for row in rows if row["who"] != "vLLM")
    assert {row["goal"] for row in rows} == {None}
    if importlib.util.find_spec("vllm") is None:
        assert [row["note"] for row in rows if row["who"] == "vLLM"] == ["not installed"]
    assert capsys.readouterr().out.count("| tiny decode, batch 3, context 24 |") == 3


def test_steps_run_with_and_without_captured_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_STEPS", 2)
    device = CapturingDevice()

    rows = list(measure_steps(TINY, device, _H200, rounds=1, judged=True))

    assert [row.note.rpartition("; ")[2] for row in rows] == ["graphs", "graphs", "graphs", "no graphs", "no graphs"]
    assert [row.goal for row in rows] == [0.7, None, 0.6, None, None]
    assert device.captured == 3  # at the start: of 1, 2 and 3 rows, the bucket boundaries
    assert device.replays == 3 * 2 * len(TINY.batches)  # two warm-ups and a round, of two steps each


def test_layers_are_timed_by_transformers_and_by_device_ops() -> None:
    device = CapturingDevice()

    rows = list(measure_layers(TINY, device, _H200, rounds=1))

    batches = [f"tiny layers without attention, batch {batch}" for batch in TINY.batches]
    assert [row.measure for row in rows] == batches * 2
    assert [row.who for row in rows] == ["transformers' layers"] * 2 + ["pdserve"] * 2
    note = "by torch: 5 norms, 2 gated MLPs, 2 attentions, 2 layers"
    assert [row.note.partition(" ms")[2] for row in rows] == ["", "", f"; {note}", f"; {note}"]
    assert (device.captured, device.replays) == (4, 4 * 3)


def test_the_least_work_of_a_step_follows_from_the_shapes() -> None:
    weights = {shape.name: shape.layer_weights + 2 * shape.head_weights for shape in (ONE_B, EIGHT_B)}
    assert weights["8B"] == pytest.approx(8.03e9, rel=1e-3)  # Llama 3 8B: 8.03 billion
    assert weights["1B"] == pytest.approx(1.236e9 + ONE_B.head_weights, rel=1e-3)  # Llama 3.2 1B ties its head

    assert EIGHT_B.kv_token_bytes == 128 << 10
    assert EIGHT_B.decode_bytes(1) == pytest.approx(2 * (8.03e9 - EIGHT_B.head_weights) + 2049 * 131_072, rel=1e-3)
    row = decode_row(EIGHT_B, "us", EIGHT_B.decode_bytes(1) / (0.7 * H200_BYTES_S), 1, _H200, 0.7, "")
    assert row.fraction == pytest.approx(0.7)
    dense = 2 * 8192 * EIGHT_B.layer_weights
    assert dense < EIGHT_B.prefill_operations() < 1.1 * dense
    assert prefill_row(EIGHT_B, "us", 0.2, _H200, 0.6, "").fraction == pytest.approx(0.74, abs=0.02)


def test_the_operations_of_a_prefill_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    network = LlamaForCausalLM(LlamaConfig(**TINY.config(), attn_implementation="eager"))
    with FlopCounterMode(display=False) as counter:
        network(torch.full((TINY.prompts, TINY.prompt_tokens), 7), logits_to_keep=1)

    tokens = TINY.prompts * TINY.prompt_tokens
    hidden = tokens * (TINY.prompt_tokens - 1) // 2  # eager attention also computes the future tokens, and masks them
    rotary = 2 * tokens * TINY.head_dim // 2 // TINY.prompts  # positions times frequencies, once for all prompts
    attended = 4 * hidden * TINY.num_layers * TINY.num_heads * TINY.head_dim
    assert counter.get_total_flops() - attended == pytest.approx(TINY.prefill_operations(), abs=rotary)


def test_a_row_has_its_fraction_and_whether_it_is_enough() -> None:
    enough, short = Row("a", "us", 7.0, "GB/s", 10.0, "x", 0.7), Row("a", "us", 6.9, "GB/s", 10.0, "x", 0.7)

    assert (enough.fraction, enough.met, short.met) == (0.7, True, False)
    assert (Row("a", "us", 7.0).fraction, Row("a", "us").met) == (None, None)
    assert markdown([enough]).splitlines()[-1] == "| a | us | 7 GB/s | 10 GB/s, x | 70% | 70% | yes |  |"


@pytest.mark.long
@pytest.mark.cluster
def test_processes_hand_off_and_serve_on_a_tiny_model(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [
        sys.executable, "-P", str(SCRIPT), "--device", "cpu", "--tiny", "--parts", "hand-off", "pd", "--ranks", "2",
        "--transport", "process_group",
    ]  # fmt: skip

    with subprocess.Popen([*command, "--json", str(file)], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as running:
        try:
            _, errors = running.communicate(timeout=300)
        finally:
            running.terminate()  # it stops what it started; killing it would leave a cluster behind

    assert running.returncode == 0, errors
    rows = json.loads(file.read_text())["rows"]
    assert [row["note"] for row in rows if row["value"] is None] == []
    assert sum("digest" in row["measure"] for row in rows) == 2
    assert any("second token" in row["measure"] and row["who"] == "pd" for row in rows)
    assert sum("token gap p99" in row["measure"] and row["value"] > 0 for row in rows) == 2
    (handed,) = (row["value"] for row in rows if "KV handed off" in row["measure"])
    assert handed >= 4 * TINY.prompt_tokens * TINY.kv_token_bytes / 1e6
