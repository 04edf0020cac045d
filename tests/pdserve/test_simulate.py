"""`pdserve simulate`: layouts, the best of them, and what is no cost or layout."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import layouts
from pdserve.bench.pd.loads import all_loads
from pdserve.client import Client, Sample
from pdserve.layout_plot import draw, pareto
from pdserve.simulate import Row, choose, main, measured_cost, roles_of
from tests.conftest import MISSING
from wire.errors import ConfigError
from wire.step_cost import StepCost
from wire.types import Role

P, D, C = Role.PREFILL, Role.DECODE, Role.COMBINED
_COST = "--step-cost=13,0.9,1.4"


@pytest.mark.parametrize(("layout", "roles"), [("2P1D", [P, P, D]), ("3c", [C, C, C]), ("1p1d", [P, D])])
def test_a_layout_names_the_roles_of_its_instances(layout: str, roles: list[Role]) -> None:
    assert roles_of(layout) == roles


@pytest.mark.parametrize("layout", ["", "2P", "0P1D", "1P0D", "0C", "P1D", "5000C", "1P1D1C", "-1C"])
def test_what_is_no_layout_is_refused(layout: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a layout such as 2P1D or 3C, of 1 to 4096 instances"):
        roles_of(layout)


def _row(layout: str, tokens_per_s: float, ttft_p95_ms: float, gap_ms: float) -> Row:
    return Row(layout, tokens_per_s, 1.0, ttft_p95_ms, 1.0, gap_ms, 0, 1.0, 1.0, {})


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([_row("1P1D", 100, 50, 90), _row("2C", 110, 90, 90)], "2C"),  # more tokens
        ([_row("1P1D", 105, 50, 90), _row("2C", 110, 90, 90)], "1P1D"),  # about as many, first tokens sooner
        ([_row("1P1D", 10, 50, 105), _row("2C", 110, 10, 120)], "1P1D"),  # the other one's gaps are too long
        ([_row("1P1D", 10, 50, 300), _row("2C", 110, 10, 500)], "1P1D"),  # both are: the shorter ones
    ],
)
def test_the_best_layout_keeps_the_limit_of_gaps(rows: list[Row], best: str) -> None:
    assert choose(rows, 100.0).layout == best


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step-cost=1,2"], "--step-cost 1,2 must be three times in ms, such as 13,0.9,1.4"),
        (["--step-cost=0,1,1"], "must be three times in ms"),
        (["--step-cost=1,1,nan"], "must be three times in ms"),
        ([_COST, "--requests=0"], "--requests 0: must be at least 1"),
        ([_COST, "--rate=-1"], "--rate -1: must be 0 or more"),
        ([_COST, "--rate=inf"], "--rate inf: must be 0 or more"),
        ([_COST, "--ttft-limit=-1"], "--ttft-limit -1: must be 0 or more"),
        ([_COST, "--gap-limit=0"], "--gap-limit 0: must be more than 0"),
        ([_COST, "--instances=1"], r"--instances 1 is not in 2..4096"),
        ([_COST, "--layout=4"], "--layout 4 is not a layout such as 2P1D or 3C"),
        ([_COST, "--plot=layouts.pdf"], "--plot layouts.pdf: use a file that ends in .svg or .png"),
        ([_COST, "--trace=/nonexistent"], "/nonexistent: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_with_the_value(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(flags)


def test_the_loads_of_bench_pd_are_simulated_on_larger_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    layouts.main(["--instances", "2"])

    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[2] for row in rows] == ["1P1D", "2C", "1P1D auto"] * 7
    assert len({row[1] for row in rows}) == len(all_loads(quick=False)) == 7
    figures = {(row[1], row[2]): [float(value.strip(" |").replace(",", "")) for value in row[3:]] for row in rows}
    assert all(value > 0 for values in figures.values() for value in values)
    one = "one at a time, 512/64"
    assert figures[one, "1P1D"][1] == pytest.approx(13 + 512 * 1.4, abs=1)


def test_every_split_and_all_combined_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([_COST, "--instances=3", "--requests=6", "--rate=0", "--output-len=8", "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert [row["layout"] for row in answer["layouts"]] == ["1P2D", "1P2D auto", "2P1D", "2P1D auto", "3C"]
    assert answer["best"] in [row["layout"] for row in answer["layouts"]]
    assert answer["layouts"][0]["paths"] == {"handoff": 6}


@pytest.mark.parametrize(
    ("figures", "curve"),
    [
        ({"1P1D": (20, 100), "2C": (120, 200), "1P1D auto": (130, 150)}, ["1P1D", "2C"]),
        ({"a": (20, 100), "b": (20, 120), "c": (30, 120)}, ["b"]),
        ({"a": (20, 100)}, ["a"]),
    ],
)
def test_the_pareto_curve_has_the_layouts_none_is_better_than(
    figures: dict[str, tuple[float, float]], curve: list[str]
) -> None:
    rows = [_row(name, tokens_per_s, 1.0, gap_ms) for name, (gap_ms, tokens_per_s) in figures.items()]

    assert [row.layout for row in pareto(rows)] == curve


def test_the_plot_has_each_layout_at_five_limits_of_gaps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason=f"{MISSING}: matplotlib, of the extra `plot`")
    flags = ["--requests=6", "--rate=0", "--output-len=8", f"--plot={tmp_path / 'out' / 'layouts.svg'}"]
    figure: Any = None

    def keep(rows: Sequence[Row], **texts: Any) -> Any:
        nonlocal figure
        figure = draw(rows, **texts)
        return figure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdserve.simulate.draw", keep)
        assert main([_COST, *flags]) == 0

    lines = {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}
    assert list(lines) == ["1P1D", "1P1D auto", "2C", "Pareto curve", "--gap-limit"]
    assert [len(lines[name]) for name in ("1P1D", "1P1D auto", "2C")] == [5, 5, 5]
    assert {x for x, _ in lines["--gap-limit"]} == {100.0}
    assert ElementTree.parse(tmp_path / "out" / "layouts.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("cost", "line"),
    [
        ("13,0.9,1.4", "beside 8 streams, chunks of 57 tokens keep gaps below 0.1 s"),
        ("150,1,1", "beside 8 streams, a step takes 0.158 s (limit 0.1 s)"),
    ],
)
def test_the_last_line_is_the_chunk_that_keeps_the_limit(
    cost: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert main([f"--step-cost={cost}", "--layout=1C", "--requests=2", "--output-len=4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line


class _Measured(Client):
    def __init__(self, **costs: float) -> None:
        super().__init__("http://127.0.0.1:1")
        self._costs = costs

    def metrics(self) -> tuple[Sample, ...]:
        return tuple(
            Sample(f"pdserve_step_{name.rstrip('12')}_seconds", {}, value) for name, value in self._costs.items()
        )


def test_the_costs_of_a_running_cluster_are_those_that_were_measured() -> None:
    client = _Measured(base1=0.0, base2=0.02, sequence1=0.0, sequence2=0.001, token1=0.003, token2=0.001)

    assert measured_cost(client) == StepCost(0.02, 0.001, 0.002)


@pytest.mark.parametrize(
    ("costs", "what"),
    [
        ({"base": 0.1}, "the time of a prompt token"),
        ({"token": 0.1}, "the time of a decode step"),
        ({}, "the time of a prompt token"),
    ],
)
def test_a_cluster_that_served_nothing_yet_says_so(costs: dict[str, float], what: str) -> None:
    with pytest.raises(ConfigError, match=f"http://127.0.0.1:1 has not measured {what} yet: send it some requests"):
        measured_cost(_Measured(**costs))
