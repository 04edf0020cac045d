"""scripts/test: every test is in one part, results are kept by commit, and only tests of native code compile it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts import LIMIT_S, PARTS, num_workers, paths_of, results_folder, summary

ROOT = Path(__file__).parents[2]
_RESULT = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="2" time="{}" /></testsuites>'


def _run(*command: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip


def test_every_test_file_is_in_exactly_one_part() -> None:
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")}
    chosen = [
        str(file.relative_to(ROOT))
        for part in PARTS
        for path in paths_of(part)
        for file in (ROOT / path).rglob("test_*.py")
    ]

    assert sorted(chosen) == sorted(files)


def test_the_summary_shows_each_part_of_this_commit(tmp_path: Path) -> None:
    (tmp_path / "engine.xml").write_text(_RESULT.format(30, 0, 61.4))
    (tmp_path / "faults.xml").write_text(_RESULT.format(9, 1, LIMIT_S + 1))

    lines, is_green = summary(tmp_path)

    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert list(rows) == ["part", *PARTS]
    assert rows["engine"].split() == ["28", "0", "2", "1", "min"]
    assert rows["faults"].split() == ["6", "1", "2", "60", "min", "over", "the", "limit", "of", "60", "min"]
    assert rows["cluster"] == "not run"
    assert not is_green


def test_a_commit_is_green_once_every_part_is_green(tmp_path: Path) -> None:
    for part in PARTS:
        (tmp_path / f"{part}.xml").write_text(_RESULT.format(3, 0, 5.0))

    assert summary(tmp_path)[1]
    (tmp_path / "workers.xml").write_text(_RESULT.format(2, 0, 5.0))  # both skipped
    assert not summary(tmp_path)[1]


def test_results_of_a_changed_tree_are_not_the_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_RUN_DIR", str(tmp_path / "run"))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    clean = results_folder(tmp_path)
    (tmp_path / "changed").touch()

    changed = results_folder(tmp_path)

    assert clean.parent == changed.parent == tmp_path / "run" / "tests"
    assert changed.name == f"{clean.name}-changed"


@pytest.mark.parametrize(
    ("cores", "free_gib", "workers"), [(1, 64, 3), (2, 23, 3), (4, 64, 5), (16, 64, 8), (16, 9, 4), (16, 2, 3)]
)
def test_workers_follow_the_cores_and_the_memory(cores: int, free_gib: int, workers: int) -> None:
    assert num_workers(cores, free_gib << 30) == workers


def test_an_unknown_part_is_refused_with_the_known_names(tmp_path: Path) -> None:
    """In a tree whose scripts/install installs nothing, so that a clone without .venv stays as it is."""
    for name, lines in {
        "scripts/test": (ROOT / "scripts" / "test").read_text(),
        "scripts/install": "#!/bin/sh\n",
        ".venv/bin/python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(lines)
        file.chmod(0o755)

    done = _run(str(tmp_path / "scripts" / "test"), "--all=engin", PYTHONPATH=str(ROOT))

    assert done.returncode == 2
    assert f"--all=engin: the parts are {', '.join(PARTS)}" in done.stderr


def test_tests_without_native_code_compile_nothing(tmp_path: Path) -> None:
    done = _run(
        sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "tests/telemetry/test_capped_logs.py",
        PDSERVE_CACHE_DIR=str(tmp_path), CC="false",
    )  # fmt: skip

    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "native").exists()
