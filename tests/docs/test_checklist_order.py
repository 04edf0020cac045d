"""Lines 143 and 144 of the checklist: each named package has a CI job, and each named folder is at the top level."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [folder.replace(".", "/") for folder in PROJECT["tool"]["setuptools"]["packages"]]
MODULE_BY_DISTRIBUTION = {
    "torch": "torch",
    "transformers": "transformers",
    "grpcio": "grpc",
    "protobuf": "google.protobuf",
    "ray": "ray",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "pydantic": "pydantic",
    "pyyaml": "yaml",
}
"""Not torch_npu: its job comes with the NPU backend."""
FOLDERS = (
    "scheduler", "prefill_worker", "decode_worker", "kvtransfer", "ranktable_tools", "proto", "deploy", "tests",
    "scripts",
)  # fmt: skip


def _imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.fixture(scope="module")
def imported() -> frozenset[str]:
    """Every module that the product's own files import."""
    files = (path for package in PACKAGES for path in (ROOT / package).glob("*.py"))
    return frozenset(name for path in files for name in _imported_modules(path))


@pytest.mark.covers("A10.143")
@pytest.mark.parametrize(("distribution", "module"), MODULE_BY_DISTRIBUTION.items())
def test_a_named_package_is_declared_and_has_a_job(distribution: str, module: str, imported: frozenset[str]) -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [*PROJECT["project"]["dependencies"], *(line for name in ("engine", "ray") for line in extras[name])]

    assert distribution in {re.split(r"[<>=\[;~ ]", line)[0] for line in declared}
    assert any(name == module or name.startswith(f"{module}.") for name in imported)


@pytest.mark.covers("A10.144")
def test_the_named_folders_are_at_the_top_level() -> None:
    assert (ROOT / "pyproject.toml").is_file()
    assert [name for name in FOLDERS if not (ROOT / name).is_dir()] == []
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert {"scheduler", "prefill_worker", "decode_worker", "kvtransfer", "ranktable_tools"} <= packages
    assert {"proto", "deploy", "tests", "scripts"}.isdisjoint(packages)
    assert packages == {package for package in PACKAGES if "/" not in package}
