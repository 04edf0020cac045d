"""`pdserve up` under auto: cards are used if each rank gets its own, else the CPU, with a message."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pdserve.card_shortage import why_cpu
from ranktable_tools.devices.tools import ToolOutput


@pytest.mark.parametrize(
    ("nodes", "ranks", "environ", "why"),
    [
        ((), 2, {}, None),
        (("nvidia0", "nvidia1"), 2, {}, None),
        (("nvidia0",), 2, {}, "2 ranks are more than the 1 cuda cards visible here"),
        (("davinci0", "davinci1"), 4, {}, "4 ranks are more than the 2 npu cards visible here"),
        (
            ("nvidia0", "nvidia1"), 2, {"CUDA_VISIBLE_DEVICES": "1"},
            "2 ranks are more than the 1 cards of CUDA_VISIBLE_DEVICES",
        ),
        (("nvidia0", "nvidia1"), 2, {"CUDA_VISIBLE_DEVICES": "1,0"}, None),
        (("nvidia0",), 1, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        (
            ("nvidia0",), 1, {"CUDA_VISIBLE_DEVICES": ""},
            "1 ranks are more than the 0 cards of CUDA_VISIBLE_DEVICES",
        ),
        (
            ("nvidia0",), 2, {"CUDA_VISIBLE_DEVICES": "1,-1,0"},
            "2 ranks are more than the 1 cards of CUDA_VISIBLE_DEVICES",
        ),
    ],
)  # fmt: skip
def test_ranks_share_no_card_unless_configured(
    nodes: tuple[str, ...], ranks: int, environ: Mapping[str, str], why: str | None, tmp_path: Path
) -> None:
    for node in nodes:
        (tmp_path / node).touch()

    def run(command: Sequence[str]) -> ToolOutput:
        raise AssertionError(f"{command}: there is no driver's tool on this path")

    there = {"PATH": "/nowhere", **environ}

    assert why_cpu("auto", ranks, there, run=run, dev=tmp_path) == why
    assert why_cpu("cuda", ranks, there, run=run, dev=tmp_path) is None
