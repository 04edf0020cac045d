"""The clients in docs/conformance.md: each file of their tests names one in its first line, and what it shows."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "clients"
EVERY_TIME = ROOT / "tests" / "conformance" / "test_openai_client.py"
"""The one that scripts/test runs too, beside the pair that it shares."""
_NODE = re.compile(r"// The official .* client for (\w+): (.*)\.\n")


def client_rows() -> Iterator[str]:
    """Yield the lines of the table: the client, the version that is pinned, and what is shown."""
    yield "| client | version | what is shown |\n|---|---|---|\n"
    for path in sorted((*CLIENTS.glob("test_*.py"), EVERY_TIME), key=lambda path: path.name):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        client, _, shown = docstring.splitlines()[0].rstrip(".").partition(": ")
        venv = CLIENTS / "venvs" / f"{path.stem.removeprefix('test_')}.txt"
        pins = _pins(venv if venv.exists() else ROOT / "constraints.txt")
        yield f"| {client} | {pins[_normalized(client.partition(' ')[0])]} | {shown} |\n"
    yield from _node_rows()


def _node_rows() -> Iterator[str]:
    """Yield the lines of the clients for Node: scripts whose first line names one."""
    packages = json.loads((CLIENTS / "node" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    for path in sorted((CLIENTS / "node").glob("*.test.mjs")):
        script = path.read_text(encoding="utf-8")
        if named := _NODE.match(script):
            package = next(name for name in packages if f"from '{name}'" in script)
            yield f"| {package} ({named[1]}) | {packages[package]} | {named[2]} |\n"


def _pins(path: Path) -> dict[str, str]:
    lines = [line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line]
    return {_normalized(name): version for name, version in lines}


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-")
