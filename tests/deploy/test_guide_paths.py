"""deploy/link_guide_paths: in its folder the guide's `sh` and `python` lines run as printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.guide_lines import BUILD, GEN, MERGE, PORTS, start

CLONE = Path(__file__).resolve().parent.parent.parent
LINKS = CLONE / "deploy" / "link_guide_paths"

# Stands in for Python in the shell scripts: finds every module and prints what it was started with.
RECORDER = """#!/bin/sh
case "$1$2" in -c* | -P-c) exit 0 ;; esac
echo "$@"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the links."""
    done = _sh(f"sh {LINKS} '{tmp_path / 'the guide'}'", tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path / "the guide"


def _sh(line: str, cwd: Path, home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the guide, with a `python` that is this one."""
    programs = home / "bin"
    programs.mkdir(exist_ok=True)
    if not (programs / "python").is_symlink():
        (programs / "python").symlink_to(sys.executable)
    clean = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PDSERVE_PYTHON": sys.executable, **environ}
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=300, cwd=cwd, env=clean)


@pytest.fixture
def recorder(tmp_path: Path) -> str:
    """A Python that records its arguments."""
    path = tmp_path / "python-recorder"
    path.write_text(RECORDER)
    path.chmod(0o700)
    return str(path)


def test_a8_the_guides_ranktable_lines_run_as_printed(folder: Path, tmp_path: Path) -> None:
    environ = {"LLM_TOOLS_PATH": "AscendCloud/AscendCloud-LLM/llm_tools"}
    parts = (("18", "--prefill-server-list 4,5 --api-server"), ("19", "--decode-server-list 6,7"))

    generated = _sh(GEN, folder, tmp_path, **environ)
    for last, lists in parts:
        tool = f"python ${{LLM_TOOLS_PATH}}/PD_separate/pd_ranktable_tools.py --mode gen --ip 10.0.0.{last}"
        _sh(f"{tool} {lists} --save-dir ranktable", folder, tmp_path, **environ)
    merged = _sh(MERGE, folder, tmp_path, **environ)

    assert (generated.returncode, merged.returncode) == (0, 0), generated.stderr + merged.stderr
    assert len(list((folder / "save_dir").glob("local_ranktable_*.json"))) == 3
    assert (folder / "save_dir" / "global_ranktable_merge.json").is_file()


@pytest.mark.parametrize("below", [".", "AscendCloud"])
@pytest.mark.parametrize("end", PORTS)
def test_a8_the_guides_start_line_runs_as_printed(
    folder: Path, tmp_path: Path, recorder: str, below: str, end: str
) -> None:
    done = _sh(start(end), folder / below, tmp_path, PDSERVE_PYTHON=recorder, model="/models/m")

    assert done.stdout == (
        "-P -m pdserve.launch --model=/models/m --tensor-parallel-size=2 --max-model-len=4096 --max-num-seqs=256 "
        f"--max-num-batched-tokens=4096 --host=0.0.0.0 --port={PORTS[end]} --served-model-name model-name\n"
    )


@pytest.mark.covers("A8.119")
def test_the_guides_build_line_runs_as_printed(folder: Path, tmp_path: Path, recorder: str) -> None:
    done = _sh(BUILD, folder, tmp_path, PDSERVE_PYTHON=recorder, base_image="cann:9", image_name="pd")

    assert done.stdout == "-P -m pdserve.container_command build_image --base-image=cann:9 --image-name=pd\n"


def test_a_second_run_changes_nothing(folder: Path, tmp_path: Path) -> None:
    before = sorted((path, path.lstat().st_mtime_ns) for path in folder.rglob("*"))

    done = _sh(f"sh {LINKS} .", folder, tmp_path)

    assert done.returncode == 0
    assert sorted((path, path.lstat().st_mtime_ns) for path in folder.rglob("*")) == before


@pytest.mark.parametrize("taken", ["AscendCloud-LLM", "AscendCloud/AscendCloud-LLM/llm_tools/PD_separate"])
def test_existing_files_are_not_touched(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).mkdir(parents=True)

    done = _sh(f"sh {LINKS} .", tmp_path, tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith(f"link_guide_paths: {taken}: is there already, but must be a link to ")
    assert not list(tmp_path.rglob("build_image.sh"))


def test_a_link_to_another_clone_is_named(tmp_path: Path) -> None:
    (tmp_path / "AscendCloud-LLM").symlink_to("/opt/other")

    done = _sh(f"sh {LINKS} .", tmp_path, tmp_path)

    assert done.stderr.startswith("link_guide_paths: AscendCloud-LLM: is a link to /opt/other, but must be")


def test_a_folder_that_cannot_be_created_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    done = _sh(f"sh {LINKS} file", tmp_path, tmp_path)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "file" in done.stderr


def test_an_old_python_is_one_line_with_advice(tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o700)

    done = _sh(f"sh {LINKS} .", tmp_path, tmp_path, PDSERVE_PYTHON=str(old))

    assert done.returncode == 2
    assert done.stderr == (
        f"link_guide_paths: {old} is older than Python 3.11, or does not run: set PDSERVE_PYTHON to a newer one\n"
    )
