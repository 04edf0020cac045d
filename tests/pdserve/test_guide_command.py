"""`pd_ranktable_tools --config cluster.yaml`: the guide's tool takes the file that every command takes."""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pdserve.guide_command import main

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "deploy" / "PD_separate" / "pd_ranktable_tools.py"
FILE = """\
model: /models/Qwen3-0.6B          # for those who serve
ports: 8088,8089                   # for ranktable gen
mode: gen
prefill-server-list: ["4,5"]
decode-server-list: 6,7
global-ranktable-list: [a.json, b.json]
api-server: yes
ip: 10.0.0.18
device-type: cpu
save-dir: tables
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(FILE)


def _names(folder: str = "tables") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_gen_reads_all_of_its_flags_from_the_clusters_file() -> None:
    assert main(["--config", "cluster.yaml"]) == 0

    assert _names() == [
        "global_ranktable_10.0.0.18.json",
        "local_ranktable_10.0.0.18_45.json",
        "local_ranktable_10.0.0.18_67.json",
        "local_ranktable_10.0.0.18_host.json",
    ]


def test_flags_override_the_file_and_other_modes_keys_are_ignored(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for ip, flag in (("10.0.0.1", "--api-server"), ("10.0.0.2", "--mode=gen")):
        main([flag, "--prefill-server-list=1", "--decode-server-list=2", "--ip", ip, "--device-type=cpu"])
    part = json.loads(Path("global_ranktable_10.0.0.1.json").read_text())
    Path("a.json").write_text(json.dumps(part))
    Path("b.json").write_text(Path("global_ranktable_10.0.0.2.json").read_text())

    assert main(["--mode", "merge", "--config=cluster.yaml", "--save-dir", "whole"]) == 0, capsys.readouterr().err

    assert _names("whole") == ["global_ranktable_merge.json"]


def test_the_files_mode_applies_if_none_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("merge.yaml").write_text(FILE.replace("mode: gen", "mode: merge"))

    assert main(["--config", "merge.yaml"]) == 2

    assert "-ERROR: a.json: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ip: 10.0.0.1\nprefil-server-list: 4\n", "cluster.yaml:2: unknown key 'prefil-server-list': did you mean"),
        ("mode: join\n", "cluster.yaml:1: mode: 'join' is not one of gen, merge, merge-local"),
        ("ip: &a 10.0.0.1\nsave-dir: *a\n", "cluster.yaml:2: *a is an alias"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place_and_status_2(
    text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("cluster.yaml").write_text(text)

    assert main(["--config=cluster.yaml"]) == 2

    reported = capsys.readouterr().err
    assert f"-ERROR: {words}" in reported
    assert reported.count("\n") == 1


def test_the_script_of_the_clone_takes_the_file_too() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--config=cluster.yaml"], timeout=300, env={}, check=False)

    assert done.returncode == 0
    assert len(_names()) == 4


def test_without_pyyaml_a_file_is_refused_with_a_reason() -> None:
    """-S hides the installed packages, as on a host with nothing but Python."""
    command = [sys.executable, "-S", str(TOOL), "--config=cluster.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={}, check=False)

    assert done.returncode == 2
    assert "-ERROR: --config needs the Python package yaml, which is not installed: " in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_installed_command_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["pd_ranktable_tools"].partition(":")

    assert getattr(importlib.import_module(module), name) is main


def test_a_key_of_the_guides_tool_is_ignored_by_others() -> None:
    from pdserve.ranktable_command import with_file

    assert with_file(["lint", "--config=cluster.yaml", "a.json"], {})[0] == ["lint", "a.json"]
