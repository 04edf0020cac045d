"""Tab completion of a command line: over argcomplete's protocol, and in bash itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_BIN = Path(sys.executable).parent


def _completed(folder: Path, line: str, module: str = "pdserve", **environ: str) -> list[str]:
    """Return the proposals for the end of a line."""
    proposals = folder / "proposed"
    variables = {
        "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(proposals),
        "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "PDSERVE_RUN_DIR": str(folder),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", module], env={**os.environ, **variables, **environ}, capture_output=True,
        text=True, timeout=300, check=False, cwd=folder,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return proposals.read_text().splitlines()


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("pdserve do", ["down", "door"]),
        ("pdserve up --max-num-s", ["--max-num-seqs"]),
        ("pdserve up --model m --device ", ["auto", "cpu", "cuda", "npu"]),
        pytest.param("pdserve bench en", ["engine"], marks=pytest.mark.long),
        ("pdserve bench engine --pee", ["--peer", "--peer-dtype"]),
        pytest.param("pdserve down --t", ["--timeout"], marks=pytest.mark.long),
        pytest.param("pdserve logs --conf", ["--config"], marks=pytest.mark.long),
    ],
)
def test_commands_flags_and_values_are_proposed(tmp_path: Path, line: str, proposed: list[str]) -> None:
    assert _completed(tmp_path, line) == proposed


@pytest.mark.parametrize(
    ("module", "line", "proposed"),
    [
        ("pdserve.ranktable_command", "ranktable ge", ["gen"]),
        ("pdserve.ranktable_command", "ranktable gen --save", ["--save-dir"]),
        ("pdserve.guide_command", "pd_ranktable_tools --mode ", ["gen", "merge", "merge-local"]),
    ],
)
def test_the_ranktable_tools_are_completed_too(tmp_path: Path, module: str, line: str, proposed: list[str]) -> None:
    assert _completed(tmp_path, line, module) == proposed


def test_zsh_gets_a_description_of_each_command(tmp_path: Path) -> None:
    assert _completed(tmp_path, "pdserve dow", _ARGCOMPLETE_SHELL="zsh") == ["down:stop what `up` started"]


def test_bash_completes_after_one_line_of_its_start_file(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("no bash on this machine")
    script = """
eval "$(register-python-argcomplete pdserve)"
COMP_LINE="pdserve up --max-num-s" COMP_POINT=22 COMP_TYPE=9 COMP_WORDBREAKS=" "
_python_argcomplete_pdserve pdserve 2>/dev/null || _python_argcomplete pdserve
echo "${COMPREPLY[@]}"
"""
    environ = {**os.environ, "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}"}

    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=300, check=False)

    assert done.stdout.strip() == "--max-num-seqs", done.stderr


def test_without_argcomplete_a_tab_runs_nothing(tmp_path: Path) -> None:
    code = "import sys; sys.modules['argcomplete'] = None; from pdserve.cli import main; main(['model', 'path'])"
    line = "pdserve model path "
    environ = {**os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}

    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, timeout=300, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
