"""docker_run.sh and build_image.sh with `--config cluster.yaml`: flags over environment over file, one file for all."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.container_command import main, with_file
from pdserve.instance_flags import parse_instance_flags
from pdserve.ranktable_command import with_file as table_words

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
Capture = pytest.CaptureFixture[str]
FILE = """\
model: /models/Qwen3-8B          # for those who serve
device: npu
prefill-server-list: ["4,5"]     # for ranktable gen
image: pdserve:ascend            # docker_run.sh
dir: /data
volume: [/a:/b, "/c:/d:ro"]
global-rank-table: file.json     # the scheduler's, and docker_run.sh's
base-image: cann:9.1             # build_image.sh
image-name: pdserve:ascend
with-torchvision-npu: yes
print: true
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"):
        monkeypatch.delenv(name, raising=False)
    Path("cluster.yaml").write_text(FILE)


def test_each_tool_reads_only_its_own_keys_of_the_file() -> None:
    run = with_file("docker_run", ["prefill", "--config", "cluster.yaml", "--", "sh", "-c", "--config=x"], {})
    build = with_file("build_image", ["--config=cluster.yaml"], {})

    assert run == [
        "prefill", "--image=pdserve:ascend", "--dir=/data", "--volume=/a:/b", "--volume=/c:/d:ro",
        "--global-table=file.json", "--", "sh", "-c", "--config=x",
    ]  # fmt: skip
    assert build == [
        "--device=ascend", "--base-image=cann:9.1", "--image-name=pdserve:ascend", "--with-torchvision-npu", "--print",
    ]  # fmt: skip


def test_flags_override_the_environment_and_that_the_file() -> None:
    typed = ["prefill", "--config=cluster.yaml", "--volume=/e:/f", "--image", "mine"]

    assert with_file("docker_run", typed, {"GLOBAL_RANK_TABLE_FILE_PATH": "env.json"}) == [
        "prefill", "--volume=/e:/f", "--image", "mine", "--dir=/data",
    ]  # fmt: skip
    Path("cluster.yaml").write_text("global-rank-table: a.json\nglobal-table: b.json\nlocal-table: c.json\n")
    assert with_file("docker_run", ["prefill", "--config=cluster.yaml"], {}) == [
        "prefill", "--global-table=b.json", "--local-table=c.json",
    ]  # fmt: skip


@pytest.mark.parametrize(("device", "kind"), [("auto", []), ("cpu", ["--device=cpu"]), ("cuda", ["--device=cuda"])])
def test_the_images_kind_is_the_device_of_the_processes(device: str, kind: list[str]) -> None:
    Path("cluster.yaml").write_text(f"device: {device}\nwith-torchvision-npu: false\n")

    assert with_file("build_image", ["--config=cluster.yaml"], {}) == kind


def test_the_command_is_built_from_the_file_alone(capsys: Capture) -> None:
    Path("cluster.yaml").write_text("image: i\ndir: /data\nname: c1\nshm-size: 2g\n")

    assert main(["docker_run", "scheduler", "--config=cluster.yaml"]) == 0

    line = shlex.split(capsys.readouterr().out.replace("\\\n", ""))
    assert line[-2:] == ["i", "/bin/bash"]
    assert "/data:/data" in line
    assert line[line.index("--name") + 1] == "c1"


@pytest.mark.parametrize("tool", ["docker_run", "build_image"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: m\n# a comment\nimag: i\n", "cluster.yaml:3: unknown key 'imag': did you mean image?"),
        ("image: &a i\ndir: *a\n", "cluster.yaml:2: *a is an alias: write the value out"),
        ("image: !!python/name:os.system\n", "cluster.yaml:1: image has the tag "),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place_and_status_2(
    tool: str, text: str, words: str, capsys: Capture
) -> None:
    Path("cluster.yaml").write_text(text)

    assert main([tool, "--config=cluster.yaml"]) == 2

    reported = capsys.readouterr().err
    assert reported.startswith(f"{tool}.sh: {words}")
    assert reported.count("\n") == 1


def test_a_wrong_value_is_reported_with_its_line(capsys: Capture) -> None:
    Path("cluster.yaml").write_text("dir: /data\nshm-size: [1g, 2g]\n")

    assert main(["docker_run", "scheduler", "--config=cluster.yaml"]) == 2
    assert "cluster.yaml:2: shm-size takes one value, not a list" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["docker_run.sh", "build_image.sh"])
def test_without_pyyaml_scripts_run_and_a_file_is_refused(script: str, tmp_path: Path) -> None:
    """-S hides the installed packages, as on a host with nothing but Python."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o700)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": os.environ["PATH"], "PDSERVE_PYTHON": str(bare)}
        command = ["sh", str(DEPLOY / script), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, check=False)

    helped, refused = run("--help"), run("--config=cluster.yaml")

    assert (helped.returncode, "--config cluster.yaml" in helped.stdout) == (0, True), helped.stderr
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"{script}: --config needs the Python package yaml, which is not installed: ")
    assert refused.stderr.count("\n") == 1


def test_the_file_is_valid_for_the_other_commands_too() -> None:
    assert parse_instance_flags(["--config=cluster.yaml"], {}).options.model == "/models/Qwen3-8B"
    assert table_words(["gen", "--config=cluster.yaml"], {})[0] == ["gen", "--prefill-server-list", "4,5"]
