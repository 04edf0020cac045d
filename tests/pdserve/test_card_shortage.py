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
        (("nvidia0",), 2, {}, "there are more ranks (2) than visible cuda cards (1)"),
        (("davinci0", "davinci1"), 4, {}, "there are more ranks (4) than visible npu cards (2)"),
        (
            ("nvidia0", "nvidia1"), 2, {"CUDA_VISIBLE_DEVICES": "1"},
            "there are more ranks (2) than cards in CUDA_VISIBLE_DEVICES (1)",
        ),
        (("nvidia0", "nvidia1"), 2, {"CUDA_VISIBLE_DEVICES": "1,0"}, None),
        (("nvidia0",), 1, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        (
            ("nvidia0",), 1, {"CUDA_VISIBLE_DEVICES": ""},
            "there are more ranks (1) than cards in CUDA_VISIBLE_DEVICES (0)",
        ),
        (
            ("nvidia0",), 2, {"CUDA_VISIBLE_DEVICES": "1,-1,0"},
            "there are more ranks (2) than cards in CUDA_VISIBLE_DEVICES (1)",
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
