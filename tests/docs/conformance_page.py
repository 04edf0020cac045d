"""docs/conformance.md: each line of the request checklist, the tests named after it, and the ways that they serve.

python -m tests.docs.conformance_page writes it.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.conformance_lines import LINES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
_NUMBERED = re.compile(r"(a\d+)((?:_\d+)+)(?=_)")
_BOTH = frozenset(("served", "client"))
_HEAD = """\
# Conformance

Every line of the request checklist, with the tests that are named after it. Written by `scripts/conformance`; a test
fails where this page is not what the tests say.

**Ways**: `combined, P/D` tests run against real processes with a real model, once with one combined instance and once
over a prefill and a decode instance, and must find the same. `P/D` tests run over such a cluster alone. `front door`
tests run the HTTP surface over a scripted cluster.
"""


@dataclass(frozen=True, slots=True)
class Named:
    """A test that is named after a line."""

    file: str
    name: str
    ways: str


def tests_by_line() -> dict[tuple[str, int], list[Named]]:
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
    found, parts = tests_by_line(), [_HEAD]
    for part, lines in LINES.items():
        parts.append(f"\n## {part.upper()}\n\n| line | what | test | ways |\n|---|---|---|---|\n")
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
        return "combined, P/D" if _BOTH & {argument.arg for argument in function.args.args} else "combined"
    return {"cluster": "P/D", "scheduler": "front door"}.get(folder, folder)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
