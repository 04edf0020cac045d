"""docs/conformance.md: each line of the request checklist, the tests named after it, and the ways that they serve.

python -m tests.docs.conformance_page writes it.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.conformance_lines import LINES as CHECKLIST
from tests.docs.conformance_surfaces import READINGS, SURFACES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
LINES = CHECKLIST | {"a11": READINGS} | SURFACES
_NUMBERED = re.compile(r"(?<=_)(a\d+|b_[a-z]+)((?:_\d+)+)(?=_)")
_BOTH = frozenset(("served", "client", "way", "answered"))
_PAIR = frozenset(("pair", "cluster", "http", "printed", "GuideCluster"))
_HEAD = """\
# Conformance

Every line of the request checklist, with the tests that are named after it. Written by `scripts/conformance`; a test
fails where this page is not what the tests say.

**Ways**: `combined, P/D` tests run against real processes with a real model, once with one combined instance and once
over a prefill and a decode instance, and must find the same. `P/D` tests run over such a cluster alone. `front door`
tests run the HTTP surface over a scripted cluster. `combined` tests run one instance, other words name the package that
is tested alone.

A1 to A9 are the lines of the guides, A10 those of the order itself, A11 the readings where they contradict each other,
and the parts from B on what users of today's vLLM rely on, surface by surface.
"""


@dataclass(frozen=True, slots=True)
class Named:
    """A test that is named after a line."""

    file: str
    name: str
    ways: str


def named_tests() -> dict[tuple[str, int], list[Named]]:
    """Return the tests of each line, in the order of files and names."""
    found: dict[tuple[str, int], list[Named]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for function in _functions(path):
            told = Named(str(path.relative_to(ROOT)), function.name, _ways(path, function))
            for part, numbers in _NUMBERED.findall(function.name):
                for number in numbers.split("_")[1:]:
                    found[part, int(number)].append(told)
    return found


def page() -> str:
    """Return the page's text."""
    found, parts = named_tests(), [_HEAD]
    for part, lines in LINES.items():
        title = f"B: {part[2:]}" if part in SURFACES else part.upper()
        parts.append(f"\n## {title}\n\n| line | what | test | ways |\n|---|---|---|---|\n")
        for number, what in lines.items():
            named = found.get((part, number), [])
            rows = [f"`{one.file}::{one.name}` | {one.ways}" for one in named] or ["**open** | none"]
            parts += [
                f"| {number if not at else ''} | {what if not at else ''} | {row} |\n" for at, row in enumerate(rows)
            ]
    return "".join(parts)


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def _ways(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    folder = path.parent.name
    if folder == "conformance":
        names = {argument.arg for argument in function.args.args}
        names |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        return "combined, P/D" if _BOTH & names else "P/D" if _PAIR & names else "combined"
    return {"cluster": "P/D", "scheduler": "front door"}.get(folder, folder)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
