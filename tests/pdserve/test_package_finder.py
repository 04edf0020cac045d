"""pdserve in a folder whose user has modules of the same names, as real processes."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pdserve.package_finder import NAMES

CLONE = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with engine.py, batch/ and also wire.py; none of them may be imported by us."""
    for file in (tmp_path / "engine.py", tmp_path / "batch" / "__init__.py", tmp_path / "wire.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("MINE = __file__\nprint('run:', __name__)\n")
    return tmp_path


def run(folder: Path, script: str, *, as_module: bool = False) -> str:
    (folder / "script.py").write_text(script)
    words = ["-m", "script"] if as_module else ["script.py"]
    ended = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def packages() -> list[str]:
    """Return the packages that an installed wheel has."""
    listed: list[str] = tomllib.loads((CLONE / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    return listed


def test_the_names_are_those_of_our_packages_beside_pdserve() -> None:
    assert {name.partition(".")[0] for name in packages()} - {"pdserve"} == NAMES


def test_a_wheel_has_every_package() -> None:
    folders = {path.parent.relative_to(CLONE) for name in ("pdserve", *NAMES) for path in (CLONE / name).rglob("*.py")}

    assert sorted(packages()) == sorted(".".join(folder.parts) for folder in folders)


@pytest.mark.parametrize("as_module", [False, True])
def test_our_packages_are_found_before_the_scripts_own_folder(folder: Path, as_module: bool) -> None:
    output = run(
        folder, "import pdserve, wire.errors, batch.backend, engine\nprint(engine.__file__)\n", as_module=as_module
    )

    assert output == f"{CLONE / 'engine' / '__init__.py'}\n"


def test_a_module_imported_earlier_stays(folder: Path) -> None:
    output = run(folder, "import engine\nimport pdserve\nfrom wire.errors import ConfigError\nprint(engine.MINE)\n")

    assert output == f"run: engine\n{folder / 'engine.py'}\n"


def test_a_command_started_there_finds_ours(folder: Path) -> None:
    command = [sys.executable, "-m", "pdserve", "model", "path", str(folder)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)

    assert (ended.returncode, ended.stdout) == (0, f"{folder}\n")


def test_importing_pdserve_loads_no_heavy_module() -> None:
    heavy = ("torch", "transformers", "fastapi", "pydantic", "grpc", "aiohttp", "numpy")
    lines = "import sys, pdserve\nassert 'LLM' in dir(pdserve)\n"
    check = f"print([name for name in {heavy!r} if name in sys.modules])\n"
    command = [sys.executable, "-c", f"{lines}{check}from pdserve import LLM, SamplingParams\n{check}"]
    output = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, timeout=300, check=True).stdout

    assert output == "[]\n[]\n"
