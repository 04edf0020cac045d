"""scripts/install resumes an interrupted run, and checks the native functions each time."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A Python whose venvs have an interpreter first and a pip later, if the run lives so long.
_BASE = """#!/bin/sh
case "$*" in
    "-m venv .venv")
        echo made >>{folder}/made
        mkdir -p .venv/bin
        [ -e .venv/bin/python ] || printf '#!/bin/sh\\necho "$*" >>{folder}/asked\\nexit 1\\n' >.venv/bin/python
        chmod +x .venv/bin/python
        if [ -e {folder}/breaks ]; then rm {folder}/breaks; kill -KILL "$PPID"; fi ;;
    -V) echo Python 3.12.0 ;;
esac
"""


def _install(clone: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["/bin/sh", str(clone / "scripts" / "install")], capture_output=True, text=True, timeout=300, check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHON": str(folder / "base")},
    )  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone beside a Python that its install is to take."""
    (tmp_path / "clone").mkdir()
    shutil.copytree(ROOT / "scripts", tmp_path / "clone" / "scripts")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "clone")
    (tmp_path / "base").write_text(_BASE.format(folder=tmp_path))
    (tmp_path / "base").chmod(0o755)
    return tmp_path / "clone"


def test_an_environment_that_was_broken_off_is_made_again(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "breaks").touch()

    first, second, third = (_install(clone, tmp_path) for _ in range(3))

    assert first.returncode == -signal.SIGKILL
    assert (tmp_path / "made").read_text().split() == ["made"] * 2, "the third finds it complete"
    assert ["making .venv" in done.stdout for done in (first, second, third)] == [True, True, False]
    assert not (clone / ".venv" / ".pdserve-making").exists()


@pytest.mark.parametrize("status", [0, 1], ids=["built", "no compiler"])
def test_a_stamped_environment_has_its_native_cache_checked(clone: Path, tmp_path: Path, status: int) -> None:
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    requested = f'echo "$*" >>{tmp_path}/asked'
    python.write_text(f'#!/bin/sh\n{requested}\ncase "$*" in *native.build*) exit {status};; esac\n')
    python.chmod(0o755)

    first, second = (_install(clone, tmp_path) for _ in range(2))

    assert [first.returncode, second.returncode] == [0, 0], first.stderr + second.stderr
    lines = (tmp_path / "asked").read_text().splitlines()
    assert lines.count("-P -m native.build") == 2
    assert sum(line.startswith("-m pip") and " --editable " in line for line in lines) == 1, "it was stamped"
    assert ("slower" in second.stdout) == bool(status)
