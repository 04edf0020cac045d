"""`pdserve selftest --device npu` over the NPU's real code and CPU references of its ops."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from devices.interface import Traits
from devices.npu import TRAITS
from devices.table import KINDS
from pdserve.cli import main
from pdserve.selftest.check import GROUPS, LOST_PEER
from tests.npu.npu_on_cpu import NpuOnCpu
from tests.npu.ops import NpuOps
from tests.pdserve.fake_far_end import take_fake_far_ends


@dataclass
class OnCpuKind:
    """Implements DeviceKind."""

    traits: Traits = TRAITS

    def sees_card(self) -> bool:
        return True

    def lacking(self) -> str | None:
        return None

    def open(self, index: int = 0) -> NpuOnCpu:
        return NpuOnCpu(index)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, dict[str, str], dict[str, str]]:
    """Return the exit status, and the verdicts and texts by row."""
    monkeypatch.setattr("pdserve.selftest.command.logs.configure", lambda _: None)
    monkeypatch.setitem(KINDS, "npu", OnCpuKind())
    take_fake_far_ends(monkeypatch)
    status = main(["selftest", "--device", "npu", "--report", str(tmp_path / "report.md"), *flags])
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    rows = json.loads(text.partition("```json\n")[2].partition("\n```")[0])["results"]
    names = [f"{row['group']}: {row['name']}" for row in rows]
    return (
        status,
        dict(zip(names, (row["verdict"] for row in rows), strict=True)),
        dict(zip(names, (row["words"] for row in rows), strict=True)),
    )


@pytest.mark.parametrize(
    "only",
    [
        pytest.param(
            ("--only", *(name for name in GROUPS if name not in ("links", LOST_PEER, "model")), "model: combined"),
            id="in this process",
        ),
        pytest.param((), id="all", marks=pytest.mark.long),
    ],
)
def test_every_row_of_an_npu_is_checked_and_ok(
    only: tuple[str, ...], npu_ops: NpuOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, verdicts, words = run(tmp_path, monkeypatch, *only)

    assert (status, [name for name, verdict in verdicts.items() if verdict == "FAILED"]) == (0, []), words
    for name in ("attention: decode", "attention: window", "attention: sinks", "model: combined = transformers"):
        assert verdicts[name] == "ok"
    linears = [f"linear layers: {name}" for name in TRAITS.kept_linears]
    for name in ("network: norms, gated MLPs and rotations", *linears):
        assert verdicts[name] == "ok", words[name]
    assert words["experts: in groups"] == "by NPU ops: the experts of 2 layers"
    called = {call.name for call in npu_ops.calls}
    assert {"npu_scatter_pa_kv_cache", "npu_rms_norm", "npu_swiglu"} <= called


def test_an_op_with_wrong_results_fails_its_row(
    npu_ops: NpuOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halved(rows: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return rows.chunk(2, dim)[0]

    monkeypatch.setattr(torch.ops.npu, "npu_swiglu", halved)

    status, verdicts, words = run(tmp_path, monkeypatch, "--only", "network")

    assert (status, verdicts) == (1, {"network: norms, gated MLPs and rotations": "FAILED"})
    assert "gated MLP" in next(iter(words.values()))
