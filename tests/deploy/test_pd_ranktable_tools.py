"""The guide's ranktable tool as a file: from any folder, with the standard library alone."""

import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parent.parent.parent
TOOL = CLONE / "deploy" / "PD_separate" / "pd_ranktable_tools.py"
GEN = ["--mode", "gen", "--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--api-server"]


def _run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env={}, check=False)


@pytest.mark.parametrize("linked", [False, True])
def test_it_runs_from_any_folder_with_the_standard_library_alone(tmp_path: Path, linked: bool) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the current folder was imported')")
    tool = tmp_path / "link.py" if linked else TOOL
    if linked:
        tool.symlink_to(TOOL)

    done = _run(sys.executable, "-S", str(tool), *GEN, "--ip", "10.0.0.18", "--save-dir", "out", cwd=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "global_ranktable_10.0.0.18.json",
        "local_ranktable_10.0.0.18_45.json",
        "local_ranktable_10.0.0.18_67.json",
        "local_ranktable_10.0.0.18_host.json",
    ]


def test_it_runs_as_a_module_of_the_clone(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", "pd_ranktable_tools", *GEN, "--save-dir", str(tmp_path)]

    done = _run(*command, cwd=CLONE)

    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.iterdir())) == 4


def test_bad_input_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = _run(sys.executable, "-S", str(TOOL), "--mode", "merge", cwd=tmp_path)

    assert done.returncode == 2
    assert "-ERROR: Ensure that there are two global ranktable for merge mode." in done.stderr
    assert done.stderr.count("\n") == 1
