"""The guide's launcher: which Python it uses, what it passes on, how it fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parent.parent.parent
RECORDER = """#!/bin/sh
# Stands in for Python: finds every module and prints what it was started with.
case "$2" in -c) exit 0 ;; esac
printf '%s\\n' "$@"
echo "RANK_TABLE_FILE=${RANK_TABLE_FILE-unset} PYTHONPATH=${PYTHONPATH-unset}"
"""
LAUNCH = """import os, sys
import pdserve
print(pdserve.__file__, sys.argv[1:], os.environ.get("PYTHONPATH"), sys.flags.safe_path)
"""


def _run(
    *command: str, cwd: Path | None = None, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": os.environ["PATH"], **(environ or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=clean, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of deploy/ in an otherwise empty clone."""
    shutil.copytree(CLONE / "deploy", tmp_path / "clone" / "deploy")
    return tmp_path / "clone"


@pytest.fixture
def recorder(tmp_path: Path) -> str:
    """A Python that records its arguments."""
    path = tmp_path / "python-recorder"
    path.write_text(RECORDER)
    path.chmod(0o700)
    return str(path)


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python with the standard library alone."""
    path = tmp_path / "python-bare"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize("script", ["deploy/start_servers.sh", "deploy/PD_separate/start_servers.sh"])
def test_flags_reach_the_launcher_as_typed(clone: Path, recorder: str, script: str) -> None:
    flags = ["--model=a b", "--port", "8088", "--served-model-name", "$x"]

    done = _run("sh", script, *flags, cwd=clone, environ={"PDSERVE_PYTHON": recorder})

    assert done.stderr == ""
    assert done.stdout.splitlines()[:-1] == ["-P", "-m", "pdserve.launch", *flags]


def test_torch_npu_gets_no_rank_table_file_and_pythonpath_is_kept(clone: Path, recorder: str) -> None:
    environ = {"PDSERVE_PYTHON": recorder, "RANK_TABLE_FILE": "/x.json"}

    done = _run("sh", "deploy/start_servers.sh", cwd=clone, environ=environ)

    assert done.stdout.splitlines()[-1] == "RANK_TABLE_FILE=unset PYTHONPATH=unset"


@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_it_finds_the_clone_from_anywhere_and_through_links(tmp_path: Path, clone: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    (clone / ".venv" / "bin").mkdir(parents=True)
    venv_python = clone / ".venv" / "bin" / "python"
    venv_python.write_text(RECORDER.replace("printf", "echo from-the-venv; printf"))
    venv_python.chmod(0o700)
    other_folder = tmp_path / "else where"
    other_folder.mkdir()
    (other_folder / "link.sh").symlink_to(clone / "deploy" / "start_servers.sh")
    (other_folder / "link2.sh").symlink_to("link.sh")
    tools = {"LLM_TOOLS_PATH": str(clone / "deploy")}

    linked = _run(shell, "link2.sh", cwd=other_folder)
    guide = _run(shell, "-c", "sh ${LLM_TOOLS_PATH}/PD_separate/start_servers.sh", cwd=other_folder, environ=tools)

    assert [done.stdout.splitlines()[0] for done in (linked, guide)] == ["from-the-venv", "from-the-venv"]


def test_an_uninstalled_clone_is_made_importable(clone: Path, bare_python: str) -> None:
    (clone / "fastapi.py").touch()
    (clone / "pdserve").mkdir()
    (clone / "pdserve" / "__init__.py").touch()
    (clone / "pdserve" / "launch.py").write_text(LAUNCH)

    done = _run("sh", "deploy/start_servers.sh", "--port=1", cwd=clone, environ={"PDSERVE_PYTHON": bare_python})

    assert done.stderr == ""
    assert done.stdout == f"{clone}/pdserve/__init__.py ['--port=1'] {clone} True\n"


def test_an_installed_pdserve_is_used_without_a_pythonpath(tmp_path: Path, clone: Path) -> None:
    site = tmp_path / "site"
    (site / "pdserve").mkdir(parents=True)
    (site / "fastapi.py").touch()
    (site / "pdserve" / "__init__.py").touch()
    (site / "pdserve" / "launch.py").write_text(LAUNCH)
    (clone / "pdserve").mkdir()
    python = tmp_path / "python-with-site"
    prelude = f"import sys; sys.path.append({str(site)!r})"
    (tmp_path / "boot").mkdir()
    (tmp_path / "boot" / "sitecustomize.py").write_text(prelude)
    # The recorder drops the variable with its site folder, as an installed Python has none.
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{tmp_path}/boot${{PYTHONPATH:+:$PYTHONPATH}}"\nexec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o700)

    done = _run("sh", "deploy/start_servers.sh", cwd=clone, environ={"PDSERVE_PYTHON": str(python)})

    assert done.stdout == f"{site}/pdserve/__init__.py [] {tmp_path}/boot True\n"


def test_a_pdserve_in_the_current_folder_is_not_used(tmp_path: Path, clone: Path, bare_python: str) -> None:
    for folder in (tmp_path / "trap", clone):
        (folder / "pdserve").mkdir(parents=True)
        (folder / "pdserve" / "__init__.py").touch()
        (folder / "pdserve" / "launch.py").write_text(LAUNCH)
        (folder / "fastapi.py").touch()
    script = str(clone / "deploy" / "start_servers.sh")

    done = _run("sh", script, cwd=tmp_path / "trap", environ={"PDSERVE_PYTHON": bare_python})

    assert done.stdout.startswith(f"{clone}/pdserve/__init__.py ")


@pytest.mark.parametrize("missing", ["pdserve", "fastapi"])
def test_a_missing_module_is_one_line_with_advice(clone: Path, bare_python: str, missing: str) -> None:
    if missing == "fastapi":
        (clone / "pdserve").mkdir()
        (clone / "pdserve" / "__init__.py").touch()

    done = _run("sh", "deploy/start_servers.sh", cwd=clone, environ={"PDSERVE_PYTHON": bare_python})

    assert done.returncode == 2
    assert done.stderr == f"start_servers.sh: {bare_python} cannot import {missing}: run scripts/install\n"


def test_a_missing_python_is_one_line_with_advice(clone: Path) -> None:
    done = _run("sh", "deploy/start_servers.sh", cwd=clone, environ={"PDSERVE_PYTHON": "/none/python"})

    assert done.returncode == 2
    assert done.stderr == ("start_servers.sh: no Python at /none/python: run scripts/install, or set PDSERVE_PYTHON\n")


def test_an_old_python_is_one_line_with_advice(tmp_path: Path, clone: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\necho "Unknown option: -P" >&2\nexit 2\n')
    old.chmod(0o700)

    done = _run("sh", "deploy/start_servers.sh", cwd=clone, environ={"PDSERVE_PYTHON": str(old)})

    assert done.returncode == 2
    assert done.stderr == (f"start_servers.sh: {old} is older than Python 3.11, or does not run: run scripts/install\n")
