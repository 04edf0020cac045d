"""Line 140 of the checklist: `pd_ranktable_tools` as a module, a console command and a .py file merges both kinds."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORMS = {
    "module": (sys.executable, "-m", "pd_ranktable_tools"),
    "command": (str(Path(sys.executable).with_name("pd_ranktable_tools")),),
    "file": (sys.executable, str(ROOT / "pd_ranktable_tools.py")),
    "the guide's file": (sys.executable, str(ROOT / "deploy" / "PD_separate" / "pd_ranktable_tools.py")),
}


def _run(form: Sequence[str], folder: Path, *flags: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*form, *flags], capture_output=True, text=True, timeout=300, cwd=folder, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _made(form: Sequence[str], folder: Path) -> dict[str, bytes]:
    """Generate two hosts' tables, merge the global ones, join two local ones; return the files by name."""
    folder.mkdir()
    for ip, role, more in (("10.0.0.18", "prefill", ("--api-server",)), ("10.0.0.19", "decode", ())):
        output = _run(
            form, folder, "--mode", "gen", f"--{role}-server-list", "4,5", "--ip", ip, "--device-type", "cpu", *more
        )
        assert "Generate local ranktable successful." in output
    parts = [f"global_ranktable_10.0.0.{end}.json" for end in (18, 19)]
    assert "Merge 2 global" in _run(form, folder, "--mode", "merge", "--global-ranktable-list", *parts)
    locals_ = [f"local_ranktable_10.0.0.{end}_45.json" for end in (18, 19)]
    assert "Merge 2 local" in _run(form, folder, "--mode", "merge-local", "--local-ranktable-list", *locals_)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the guide's own file writes."""
    return _made(FORMS["the guide's file"], tmp_path_factory.mktemp("guide") / "tables")


@pytest.mark.covers("A10.140")
@pytest.mark.parametrize("name", [name for name in FORMS if name != "the guide's file"])
def test_every_form_of_the_tool_writes_and_merges_the_same_tables(
    tmp_path: Path, name: str, expected: dict[str, bytes]
) -> None:
    assert _made(FORMS[name], tmp_path / "tables") == expected


@pytest.mark.covers("A10.140")
def test_the_merged_files_are_named_as_the_guide_names_them(expected: dict[str, bytes]) -> None:
    assert {"global_ranktable_merge.json", "local_ranktable_merge.json"} <= set(expected)
    assert len(expected) == 7
