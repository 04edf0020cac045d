"""deploy/docker_run.sh: cards in use, GPUs and the needs of cuda_ipc, and how docker's own client reads the line."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ranktable_tools.containers import docker_run
from ranktable_tools.containers.docker import parse_inspect
from tests.deploy.docker_run_case import FLAGS, Capture, Make, line_of, refusal_of
from tests.deploy.fake_engine import ID as ENGINE_ID
from tests.deploy.fake_engine import fake_engine
from tests.deploy.stub_docker import StubDocker, container

pytestmark = pytest.mark.usefixtures("docker")


@pytest.mark.covers("A11.20", "A8.119")
@pytest.mark.parametrize(
    "holder",
    [
        container("first", npus=[5, 6]),
        container("first", env=["ASCEND_VISIBLE_DEVICES=4-5"]),
        container("first", env=["ASCEND_VISIBLE_DEVICES=1,5"]),
    ],
)
def test_a_card_in_use_is_refused(tables: Make, docker: StubDocker, capsys: Capture, holder: dict[str, object]) -> None:
    docker.runs(container("monitor"), holder, status=1)  # status 1: one that ended meanwhile

    error = refusal_of(capsys, "prefill", *tables(), *FLAGS)

    assert "5 of the table: the container first has " in error
    assert "docker rm -f first" in error


def test_other_containers_cards_are_no_conflict(tables: Make, docker: StubDocker, capsys: Capture) -> None:
    docker.runs(container("first", npus=[0, 1, 6, 7, 45]), container("named", env=["ASCEND_VISIBLE_DEVICES=void"]))

    assert "--device=/dev/davinci5" in line_of(capsys, "prefill", *tables(), *FLAGS)
    assert len(docker.calls_of("inspect")[0]) == 3


def test_an_npu_is_never_shared(tables: Make, docker: StubDocker, capsys: Capture) -> None:
    docker.runs(container("first", npus=[4]))

    assert "card 4 of the table" in refusal_of(capsys, "prefill", *tables(), *FLAGS, "--share-devices")


def test_gpus_are_looked_up_by_label_and_by_request(tables: Make, docker: StubDocker, capsys: Capture) -> None:
    whole = [*tables(npu=False), "--device-type", "cuda", *FLAGS]
    request = {"Driver": "", "Count": 0, "DeviceIDs": ["5"], "Capabilities": [["gpu"]]}
    every = [{"Driver": "nvidia", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]]}]

    docker.runs(container("prefill-1", DeviceRequests=every, labels={"pdserve.cards": "4,5"}))
    assert "cards 4,5 of the table: the container prefill-1" in refusal_of(capsys, "prefill", *whole)
    assert line_of(capsys, "decode", *whole)
    docker.runs(container("other", DeviceRequests=[request]))
    assert "card 5 of the table: the container other" in refusal_of(capsys, "prefill", *whole)
    assert line_of(capsys, "prefill", *whole, "--share-devices")
    docker.runs(container("metrics", DeviceRequests=every))
    assert docker_run.main(["prefill", *whole]) == 0
    assert "the container metrics sees every GPU" in capsys.readouterr().err


def test_cuda_ipc_gets_what_it_needs(tables: Make, capsys: Capture) -> None:
    line = line_of(capsys, "decode", *tables(npu=False), "--device-type", "cuda", *FLAGS)

    assert {"--ipc=host", "--pid=host", "--net=host"} <= set(line)
    assert line[line.index("--gpus") + 1] == "all"
    assert "CUDA_VISIBLE_DEVICES=6,7,4,5" in line  # its own first, then the sender's
    two = line_of(
        capsys, "prefill", *tables("0 1", "2 3", npu=False), "--instance", "1", "--device-type", "cuda", *FLAGS
    )
    assert "CUDA_VISIBLE_DEVICES=1,2,3" in two  # not the other prefill instance's
    assert "memlock=-1:-1" in line


def test_a_gpu_instance_without_local_peers_gets_only_its_own_cards(
    tables: Make, tmp_path: Path, capsys: Capture
) -> None:
    tables(npu=False)
    local = ["--local-table", str(tmp_path / "local_ranktable_45.json")]

    status = docker_run.main(["prefill", *local, "--device-type", "cuda", *FLAGS])

    captured = capsys.readouterr()
    line = shlex.split(captured.out.replace("\\\n", ""))
    note = "without --global-table this container's peers on this host are not known"
    assert (status, note in captured.err) == (0, True)
    assert line[line.index("--gpus") + 1] == '"device=4,5"'
    assert not [word for word in line if word.startswith("CUDA_")]


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker client on this machine")
@pytest.mark.parametrize("kind", ["npu", "cuda", "cpu"])
def test_dockers_own_client_parses_the_line_as_meant(
    tables: Make, tmp_path: Path, docker: StubDocker, capsys: Capture, kind: str
) -> None:
    """Docker's client calls a stand-in for its engine: what it sends equals the line."""
    words = ["decode", *tables(npu=kind == "npu"), *FLAGS, "--device-type", kind, "--volume", "/m:/models:ro"]
    line = line_of(capsys, *words)
    (docker.folder / "docker").unlink()
    environ = {"PATH": os.environ["PATH"], "DOCKER_HOST": f"unix://{tmp_path}/engine", "HOME": str(tmp_path)}

    with fake_engine(tmp_path / "engine") as engine:
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, env=environ)

    assert (done.returncode, done.stdout) == (0, f"{ENGINE_ID}\n"), done.stderr
    created = engine.created
    host = created[0]["HostConfig"]
    assert (created[0]["Image"], created[0]["Cmd"], created[0]["Tty"]) == ("image1", ["/bin/bash"], True)
    assert {"/data:/work", "/m:/models:ro", "/sys/fs/cgroup:/sys/fs/cgroup:ro"} <= set(host["Binds"])
    assert (host["NetworkMode"], host["Ulimits"]) == ("host", [{"Name": "memlock", "Hard": -1, "Soft": -1}])
    nodes = [device["PathOnHost"] for device in host["Devices"]]
    cards = ["/dev/davinci6", "/dev/davinci7", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
    assert nodes == (cards if kind == "npu" else [])
    assert (host["IpcMode"], host["PidMode"]) == (("host", "host") if kind == "cuda" else ("", ""))
    assert host["ShmSize"] == (0 if kind == "cuda" else 1 << 30)
    assert [request["Count"] for request in host["DeviceRequests"] or []] == ([-1] if kind == "cuda" else [])
    given = parse_inspect(json.dumps([{"Name": "/c1", "HostConfig": host, "Config": created[0]}]))[0]
    assert given.npus | given.gpus == ({"6", "7"} if kind != "cpu" else frozenset())
