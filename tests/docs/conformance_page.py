"""docs/conformance.md: each line of the request checklist, the tests that cover it, and the ways that they serve.

A test names its lines by `@pytest.mark.covers("A8.115", "B.text.1")`.

python -m tests.docs.conformance_page            writes the page
python -m tests.docs.conformance_page --check    exit status 1 where the page differs, or a line has no test
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.route_table import ALL_ROWS, WAYS, RouteRow
from tests.docs.client_rows import client_rows
from tests.docs.conformance_lines import LINES as CHECKLIST
from tests.docs.conformance_surfaces import READINGS, SURFACES
from tests.docs.conformance_vllm_tests import vllm_tests

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
LINES = CHECKLIST | {"A11": READINGS} | SURFACES
_BOTH = frozenset(("served", "client", "way", "answered"))
_PAIR = frozenset(("pair", "cluster", "http", "printed", "GuideCluster"))
_HEAD = """\
# Conformance

Every line of the request checklist, with the tests that cover it. Written by `scripts/conformance` from the tests'
`covers` marks; `scripts/check` fails where it differs, or where a line has no test.

**Ways**: `combined, P/D` tests run against real processes with a real model, once with one combined instance and once
over a prefill and a decode instance, and must find the same. `P/D` tests run only over such a cluster. `front door`
tests run the HTTP API over a scripted cluster. `combined` tests run one instance, other words name the package that
is tested in isolation.

A1 to A9 are the lines of the guides, A10 those of the order itself, A11 the readings where they contradict each other,
and the parts from B on what users of today's vLLM rely on, by topic.
"""
_ROUTES = """
## Routes

Each request is answered the same in each way that has a `yes`, by `tests/conformance/test_routes.py`: the same ids,
text, thinking, calls and usage, log probabilities and vectors up to rounding, whole and streamed, and each stream ends
once. The ways: one combined instance, a P/D pair with KV through shared memory or over TCP, and a P and two D of which
one is killed (`kill -9`) when it has computed the token named there and sent those before. The model is random, but
thinks and calls tools as scripted. Vectors are computed by P alone, and tokens are counted by the scheduler.

"""
_CLIENTS = """
## Clients

Clients and tools, unchanged, over a P/D pair whose random model thinks and calls tools as scripted, by `tests/clients`
(`scripts/test --all=clients`).

"""


@dataclass(frozen=True, slots=True)
class CoveringTest:
    """A test with a `covers` mark."""

    file: str
    name: str
    ways: str


def covering_tests() -> dict[str, list[CoveringTest]]:
    """Return the tests of each line, in the order of files and names."""
    found: dict[str, list[CoveringTest]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for function in _functions(path):
            test = CoveringTest(str(path.relative_to(ROOT)), function.name, _ways(path, function))
            for line in _lines(function):
                found[line].append(test)
    return found


def page(found: dict[str, list[CoveringTest]]) -> str:
    """Return the page's text."""
    text = [_HEAD, _ROUTES, *_route_rows(), _CLIENTS, *client_rows()]
    for part, lines in LINES.items():
        text.append(f"\n## {part.replace('.', ': ')}\n\n| line | what | test | ways |\n|---|---|---|---|\n")
        for number, what in lines.items():
            tests = found.get(f"{part}.{number}", [])
            rows = [f"`{one.file}::{one.name}` | {one.ways}" for one in tests] or ["**open** | none"]
            text += [
                f"| {number if not at else ''} | {what if not at else ''} | {row} |\n" for at, row in enumerate(rows)
            ]
    return "".join([*text, *vllm_tests()])


def _route_rows() -> Iterator[str]:
    yield f"| route | request | {' | '.join(WAYS.values())} |\n|---|---|{'---|' * len(WAYS)}\n"
    for row in ALL_ROWS:
        yield f"| {row.route} | {row.what} | {' | '.join(_route_cell(row, way) for way in WAYS)} |\n"


def _route_cell(row: RouteRow, way: str) -> str:
    if way != "killed":
        return "yes"
    return "yes, without D" if row.killed_at is None else f"yes, at token {row.killed_at}"


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.covers":
            yield from (ast.literal_eval(argument) for argument in mark.args)


def _ways(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    folder = path.parent.name
    if folder in ("conformance", "clients"):
        names = {argument.arg for argument in function.args.args}
        names |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        return "combined, P/D" if _BOTH & names else "P/D" if _PAIR & names or folder == "clients" else "combined"
    return {"cluster": "P/D", "node": "P/D", "scheduler": "front door"}.get(folder, folder)


def main(argv: Sequence[str]) -> int:
    """Do what the module says; returns the exit status."""
    found = covering_tests()
    known = {f"{part}.{number}" for part, lines in LINES.items() for number in lines}
    faults = [f"{line}: no test covers it" for line in sorted(known - found.keys())]
    faults += [f"{line}: the checklist has no such line" for line in sorted(found.keys() - known)]
    if not argv:
        PAGE.write_text(page(found), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page(found):
        faults.append(f"{PAGE.relative_to(ROOT)} is not what the tests say: run scripts/conformance")
    sys.stderr.write("".join(f"{fault}\n" for fault in faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
