"""deploy/docker_run.sh: the guide's `docker run` line with the devices of the table, its additions and refusals."""

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from ranktable_tools.containers import build_image, docker_run
from tests.deploy.docker_run_case import FLAGS, Capture, Make, line_of, refusal_of
from tests.deploy.stub_docker import StubDocker, container

SCRIPT = Path(__file__).resolve().parent.parent.parent / "deploy" / "docker_run.sh"
# The guide's three lines, its ${} filled in.
_TAIL = (
    "-v /var/log/npu/:/usr/slog -v /usr/local/sbin/npu-smi:/usr/local/sbin/npu-smi -v /sys/fs/cgroup:/sys/fs/cgroup:ro "
    "-v /data:/work --net=host --name c1 image1 /bin/bash"
)
_HEAD = (
    "-v /etc/localtime:/etc/localtime -v /usr/local/Ascend/driver:/usr/local/Ascend/driver "
    "-v /etc/ascend_install.info:/etc/ascend_install.info --device=/dev/davinci_manager --device=/dev/devmm_svm "
    "--device=/dev/hisi_hdc"
)
GUIDE = {
    "prefill": f"docker run -itd --device=/dev/davinci4 --device=/dev/davinci5 {_HEAD} {_TAIL}",
    "decode": f"docker run -itd --device=/dev/davinci6 --device=/dev/davinci7 {_HEAD} {_TAIL}",
    "scheduler": f"docker run -itd {_HEAD} {_TAIL}",
}
ADDED = ["-v", "/etc/hccn.conf:/etc/hccn.conf:ro", "--shm-size=1g", "--ulimit", "memlock=-1:-1"]
"""What the guide's line for NPUs lacks, in the order it is added in."""
pytestmark = pytest.mark.usefixtures("docker")


@pytest.mark.covers("A8.119")
@pytest.mark.parametrize("role", ["prefill", "decode", "scheduler"])
def test_guide_exact_prints_the_guides_line(tables: Make, capsys: Capture, role: str) -> None:
    line = line_of(capsys, role, *tables(), *FLAGS, "--guide-exact")

    assert line == shlex.split(GUIDE[role])


@pytest.mark.covers("A8.119")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_run_lines_have_the_tables_devices_and_missing_options(tables: Make, capsys: Capture, role: str) -> None:
    line = line_of(capsys, role, *tables(), *FLAGS)

    cards = "4,5" if role == "prefill" else "6,7"
    added = Counter(line) - Counter(shlex.split(GUIDE[role]))
    assert added == Counter([*ADDED, "--label", f"pdserve.cards={cards}"])
    assert [word for word in line if word in GUIDE[role].split() and word != "-v"] == [
        word for word in GUIDE[role].split() if word != "-v"
    ]


@pytest.mark.covers("A8.119")
def test_the_scheduler_gets_no_device_no_node_and_no_driver(tables: Make, capsys: Capture) -> None:
    line = line_of(capsys, "scheduler", *tables(), *FLAGS)

    assert not [word for word in line if "/dev/" in word or "Ascend" in word or "npu" in word]
    assert "--net=host" in line


def test_the_scheduler_needs_no_table(capsys: Capture) -> None:
    assert line_of(capsys, "scheduler", *FLAGS)[-2:] == ["image1", "/bin/bash"]


def test_a_local_table_selects_the_instance(tables: Make, tmp_path: Path, capsys: Capture) -> None:
    whole = tables("0 1", "2,3 4,5")
    local = str(tmp_path / "local_ranktable_45.json")

    line = line_of(capsys, "decode", *whole, "--local-table", local, "--image", "i", "--dir", "/data")

    assert [word for word in line if "davinci" in word][:2] == ["--device=/dev/davinci4", "--device=/dev/davinci5"]
    assert line[line.index("--name") + 1] == "pdserve-decode-4-5"


def test_the_guides_variables_name_the_tables(
    tables: Make, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOBAL_RANK_TABLE_FILE_PATH", tables()[1])
    monkeypatch.setenv("RANK_TABLE_FILE_PATH", str(tmp_path / "local_ranktable_67.json"))

    assert "--device=/dev/davinci7" in line_of(capsys, "decode", *FLAGS)


def test_one_of_several_instances_is_selected_by_number(tables: Make, capsys: Capture) -> None:
    whole = tables("0 1", "2")

    assert "--device=/dev/davinci1" in line_of(capsys, "prefill", *whole, "--instance", "1", *FLAGS)
    assert "set --instance N or --local-table (0: 127.0.0.1 devices 0; 1:" in refusal_of(
        capsys, "prefill", *whole, *FLAGS
    )
    assert "--instance is 2, but the last prefill instance of the table has number 1" in refusal_of(
        capsys, "prefill", *whole, "--instance", "2", *FLAGS
    )


def test_a_table_of_the_other_role_is_refused(tables: Make, tmp_path: Path, capsys: Capture) -> None:
    whole = tables()
    decode, host = (str(tmp_path / f"local_ranktable_{name}.json") for name in ("67", "host"))

    wrong = refusal_of(capsys, "prefill", *whole, "--local-table", decode, *FLAGS)
    none = refusal_of(capsys, "prefill", *whole, "--local-table", host, *FLAGS)
    cards = refusal_of(capsys, "scheduler", *whole, "--local-table", decode, *FLAGS)

    assert "is decode-0 of the global table, but the role is prefill" in wrong
    assert "has no device, so it is the scheduler's" in none
    assert "has the devices 6,7; the scheduler's local table has none" in cards


def test_without_a_table_no_cards_are_passed(capsys: Capture) -> None:
    assert "prefill needs its cards: set --local-table" in refusal_of(capsys, "prefill", *FLAGS)


@pytest.mark.parametrize(
    "target",
    ["/home/ma-user", "/home/ma-user/", "/home/ma-user/work", "/home", "/", "//home//ma-user", "/x/../home/ma-user/y"],
)
@pytest.mark.parametrize("flag", ["--dir", "--container-work-dir", "--volume"])
def test_a8_a_mount_over_the_home_of_ma_user_is_refused(capsys: Capture, flag: str, target: str) -> None:
    value = f"/data:{target}" if flag == "--volume" else target
    rest = ["--image", "i"] if flag == "--dir" else ["--image", "i", "--dir", "/data"]

    error = refusal_of(capsys, "scheduler", *rest, flag, value)

    assert error.startswith(f"docker_run.sh: {flag} {target}: a mount there would hide /home/ma-user, ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("target", ["/home/ma-user2", "/home/other", "/work/home/ma-user"])
def test_other_folders_are_mounted(capsys: Capture, target: str) -> None:
    assert f"/d:{target}:ro" in line_of(capsys, "scheduler", *FLAGS, "--volume", f"/d:{target}:ro")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dir", "data"], "--dir 'data': must be an absolute path"),
        (["--dir", "/a:b"], "--dir '/a:b': must be an absolute path"),
        (["--dir", "/d", "--volume", "/a"], "--volume '/a': write HOST:CONTAINER"),
        (["--dir", "/d", "--volume", "/a:/b:rx"], "--volume '/a:/b:rx': write HOST:CONTAINER"),
        (["--dir", "/d", "--name", "-x"], "--name"),
        (["--dir", "/d", "--name", "a b"], "--name 'a b': docker allows at most 128 letters"),
        (["--dir", "/d", "--shm-size", "0"], "--shm-size '0': write a number"),
        (["--dir", "/d", "--shm", "1g"], "unknown flag --shm: did you mean --shm-size? (see docker_run.sh --help)"),
    ],
)
def test_invalid_values_are_one_line(capsys: Capture, words: list[str], message: str) -> None:
    error = refusal_of(capsys, "scheduler", "--image", "i", *words)

    assert message in error
    assert error.count("\n") == 1


def test_on_the_cpu_no_card_is_passed_and_a_note_says_so(tables: Make, capsys: Capture) -> None:
    status = docker_run.main(["prefill", *tables(npu=False), "--device-type", "cpu", *FLAGS])

    captured = capsys.readouterr()
    assert status == 0
    assert "/dev/" not in captured.out
    assert "device type cpu: no card is passed" in captured.err


def test_a_line_for_another_host_names_the_host(tables: Make, docker: StubDocker, capsys: Capture) -> None:
    whole = tables(ip="192.0.2.18")

    docker_run.main(["prefill", *whole, *FLAGS])

    assert "this line is for 192.0.2.18" in capsys.readouterr().err
    assert docker.calls_of("ps") == []
    assert "is on 192.0.2.18: run this there" in refusal_of(capsys, "prefill", *whole, *FLAGS, "--run")


def test_without_a_docker_engine_the_line_is_printed_with_a_note(
    tables: Make, docker: StubDocker, capsys: Capture
) -> None:
    (docker.folder / "docker").write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")

    status = docker_run.main(["prefill", *tables(), *FLAGS])

    captured = capsys.readouterr()
    assert (status, "--device=/dev/davinci4" in captured.out) == (0, True)
    assert "not checked whether another container has the cards: docker ps: Cannot connect" in captured.err


def test_unexpected_output_of_docker_is_one_line(tables: Make, docker: StubDocker, capsys: Capture) -> None:
    docker.runs(container("x"))
    (docker.folder / "inspect.json").write_text('[["x"]]')

    docker_run.main(["prefill", *tables(), *FLAGS])

    assert "docker inspect: not a list of containers" in capsys.readouterr().err


def test_run_passes_exactly_the_printed_arguments_to_docker(tables: Make, tmp_path: Path, docker: StubDocker) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    words = ["scheduler", "--image", "i", "--dir", str(folder), "--container-work-dir", "/work", "--run"]
    command = ["--", "sh", "-c", "echo $HOME; true"]

    done = subprocess.run(
        ["sh", SCRIPT, *words, *command], capture_output=True, text=True, timeout=300,
        env={"PATH": os.environ["PATH"], "PDSERVE_PYTHON": sys.executable},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert ["docker", *docker.calls_of("run")[0]] == shlex.split(done.stdout.replace("\\\n", ""))
    assert docker.calls_of("run")[0][-4:] == ["i", "sh", "-c", "echo $HOME; true"]
    assert f"{folder}:/work" in docker.calls_of("run")[0]


@pytest.mark.skipif(Path("/usr/local/Ascend/driver").exists(), reason="this machine has an Ascend driver")
def test_run_refuses_missing_mount_sources(tables: Make, docker: StubDocker, capsys: Capture) -> None:
    error = refusal_of(capsys, "prefill", *tables(), *FLAGS, "--run")

    assert "/usr/local/Ascend/driver" in error
    assert "/usr/local/sbin/npu-smi" in error
    assert "not on this host, and docker would create empty folders" in error
    assert docker.calls_of("run") == []


def test_an_invalid_table_is_named(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"version": "1.0"}))

    assert str(path) in refusal_of(capsys, "prefill", "--global-table", str(path), *FLAGS)


@pytest.mark.parametrize("page", ["deploy.md", "deploy.zh-CN.md"])
@pytest.mark.parametrize("script", [docker_run, build_image])
def test_the_docs_have_every_flag(page: str, script: ModuleType) -> None:
    text = (SCRIPT.parents[1] / "docs" / page).read_text()
    flags = [
        flag for action in script.command_parser()._actions for flag in action.option_strings if flag[2:] != "help"
    ]

    assert [flag for flag in flags if flag.startswith("--") and flag not in text] == []


@pytest.mark.parametrize(
    "flag", ["--image", "--dir", "--container-work-dir", "--local-table", "--global-table", "--name", "--volume",
             "--shm-size"],
)  # fmt: skip
def test_an_empty_value_is_refused_by_the_flags_name(tables: Make, capsys: Capture, flag: str) -> None:
    output = refusal_of(capsys, "prefill", *tables(), *FLAGS, flag, "")

    assert f"{flag} '' is empty: set a value (is a variable not set?)" in output


@pytest.mark.parametrize(
    ("script", "typed", "near"),
    [
        (docker_run, ["prefill", "--imag", "i", "--dir", "/d"], "--image"),
        (docker_run, ["prefill", "--image=i", "--dir=/d", "--local_tables=x"], "--local-table"),
        (build_image, ["--base-imag=i", "--image-name=n"], "--base-image"),
        (build_image, ["--base-image=i", "--image-name=n", "--with-torchvision"], "--with-torchvision-npu"),
    ],
)
def test_a_typo_in_a_flag_is_answered_with_the_nearest_one(
    script: ModuleType, typed: list[str], near: str, capsys: Capture
) -> None:
    assert script.main(typed) == 2

    output = capsys.readouterr().err
    assert f": did you mean {near}?" in output
    assert output.count("\n") == 1
