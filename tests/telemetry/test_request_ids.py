"""Every log call with a prompt id also names the request id."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("decode_worker", "engine", "instance", "kvtransfer", "prefill_worker", "rpc", "scheduler", "wire")
LEVELS = ("debug", "info", "warning", "error")


def _log_calls() -> Iterator[tuple[str, ast.Call]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                    owner = node.func.value
                    if isinstance(owner, ast.Name) and owner.id in ("log", "_log"):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_a_line_with_a_prompt_id_has_a_request_id() -> None:
    calls = dict(_log_calls())
    names = {place: {keyword.arg for keyword in call.keywords} for place, call in calls.items()}

    assert [place for place, given in names.items() if "prompt_id" in given and "request_id" not in given] == []
    assert len(calls) > 80, "the calls are found"
