"""docs/devices.md lists what ran for each feature and device: its table is compared with the existing tests."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from devices.collectives import HCCL_DEFAULTS, NCCL_DEFAULTS
from devices.table import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
_MIN_ROWS = 20
_SOURCES = "tested against the sources"
_MARKS = ("flashinfer_wheel", "hccl_rules", "nccl_rules", "tests.devices.stream", "card_float8", "include/torch")


def table_of(page: str) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Return the columns and, by feature and column, the cells of the page's first table of features."""
    lines = page[page.index("| feature |") :].split("\n\n")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return header[1:], {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def wrong_cells(page: str) -> Iterator[str]:
    """Yield an error message for each wrong cell."""
    _, table = table_of(page)
    for feature, cells in table.items():
        for kind, cell in cells.items():
            why = _find_problem(kind, cell)
            if why is not None:
                yield f"{feature}, {kind}: {why}"


def _find_problem(kind: str, cell: str) -> str | None:
    verdict = cell.partition(":")[0]
    links = _LINK.findall(cell)
    if verdict not in ("measured", _SOURCES, "neither", "none") or (verdict == "none" and links):
        return f"{cell!r} is not a verdict"
    targets = [target for _, target in links]
    if verdict == "measured" and not KINDS[kind].traits.pools_on_host:
        return "nothing was measured on a card"
    if verdict in ("measured", _SOURCES) and not targets:
        return "no test is named"
    if verdict == "measured" and targets == ["performance.md"]:
        return None
    why = next((why for target in targets if (why := _missing_target(target)) is not None), None)
    if why is None and verdict == _SOURCES and not any(_reads_sources(target) for target in targets):
        return "no named test reads the sources"
    return why


def _reads_sources(target: str) -> bool:
    """Return whether a test uses a wheel, a header, or a stand-in whose rules name their sources."""
    path = ROOT / "docs" / target.partition("#")[0]
    in_folder = path.resolve().parent == ROOT / "tests" / "npu"  # its ops have the schemas of torch_npu's wheel
    return in_folder or any(mark in path.read_text(encoding="utf-8") for mark in _MARKS)


def _missing_target(target: str) -> str | None:
    name, _, test = target.partition("#")
    path = (ROOT / "docs" / name).resolve()
    if not path.is_file() or not path.name.startswith("test_"):
        return f"{name} is not a test file"
    text = path.read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(text))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if test:
        return None if test in names else f"{name} has no {test}"
    runs_others = "vars(test_" in text  # a contract's tests over other devices
    return None if runs_others or any(one.startswith("test_") for one in names) else f"{name} has no test"


def test_every_cell_is_a_verdict_whose_tests_exist() -> None:
    columns, table = table_of(PAGE)

    assert columns == list(KINDS)
    assert len(table) >= _MIN_ROWS
    assert list(wrong_cells(PAGE)) == []


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("measured: [x](performance.md)", "nothing was measured on a card"),
        ("tested against the sources", "no test is named"),
        ("tested against the sources: [x](../tests/devices/test_nothing.py)", "is not a test file"),
        ("tested against the sources: [x](../tests/devices/test_seam.py#test_nothing)", "has no test_nothing"),
        ("tested against the sources: [x](../tests/devices/test_seam.py)", "no named test reads the sources"),
        ("neither: [x](../devices/npu.py)", "is not a test file"),
        ("contract-tested", "is not a verdict"),
        ("works", "is not a verdict"),
        ("", "is not a verdict"),
    ],
)
def test_a_cell_that_claims_too_much_is_found(cell: str, why: str) -> None:
    page = f"| feature | cpu | npu |\n|---|---|---|\n| x | none | {cell} |\n\n"

    (found,) = wrong_cells(page)

    assert found.startswith("x, npu: ")
    assert why in found


def test_the_readme_names_what_never_ran_on_a_card() -> None:
    limits = " ".join((ROOT / "README.md").read_text(encoding="utf-8").partition("## Limits")[2].split())
    message = limits.partition("nothing has ever run on a GPU or an NPU")[2].partition(" - ")[0]

    for kind in (kind.traits for kind in KINDS.values() if not kind.traits.pools_on_host):
        assert kind.kind in message
        assert kind.collective.upper() in message
    assert all(
        name in message for name in ("attention", "graphs", "quantised", "cuda_ipc", "mooncake", "first-contact")
    )


def test_the_page_names_the_variables_and_the_missing_device() -> None:
    assert "No GPU or NPU was available" in PAGE
    for name, value in {**HCCL_DEFAULTS, **NCCL_DEFAULTS}.items():
        assert f"| `{name}` | {value} (" in PAGE
