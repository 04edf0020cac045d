"""The guide's four shells: tables, three or more start_servers.sh in any order, requests on the scheduler's port."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.ports import free_ports
from tests.cluster.guide import CLONE, GuideCluster, Tables, generate

pytestmark = pytest.mark.cluster

FAKE = ("--engine=fake",)


def _complete(cluster: GuideCluster, prompt: str = "hello", **fields: object) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    reply = cluster.client.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


@pytest.mark.long
@pytest.mark.parametrize(
    "order",
    [
        ("scheduler", "decode-0", "prefill-0"),
        ("prefill-0", "scheduler", "decode-0"),
    ],
    ids="-".join,
)
def test_the_processes_may_start_in_any_order(tmp_path: Path, fake_model: Path, order: Sequence[str]) -> None:
    with GuideCluster(tmp_path, fake_model, flags=FAKE) as cluster:
        cluster.start(*order)
        cluster.wait_ready()

        assert _complete(cluster)
        cluster.wait_idle()


@pytest.mark.covers("A7.81")
@pytest.mark.long
def test_two_instances_of_each_role_serve(tmp_path: Path, fake_model: Path) -> None:
    with GuideCluster(tmp_path, fake_model, prefill=("0", "1"), decode=("2", "3"), flags=FAKE) as cluster:
        cluster.up()

        assert all(_complete(cluster, f"prompt {number}") for number in range(8))
        assert len(cluster.gauge("pdserve_kv_blocks_used")) == 4
        cluster.wait_idle()


@pytest.mark.long
def test_the_guides_commands_run_from_its_tools_path(tmp_path: Path, fake_model: Path) -> None:
    tool = CLONE / "deploy" / "PD_separate" / "pd_ranktable_tools.py"
    subprocess.run(
        [
            sys.executable, str(tool), "--mode", "gen", "--prefill-server-list", "4,5", "--decode-server-list", "6,7",
            "--api-server", "--save-dir", str(tmp_path / "save_dir"),
        ],
        check=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    (global_path,) = (tmp_path / "save_dir").glob("global_ranktable_*.json")
    locals_ = [next((tmp_path / "save_dir").glob(f"local_ranktable_*_{end}.json")) for end in ("45", "67", "host")]
    slipped = tuple(path.with_name(path.name.replace("local_ranktable_", "local_rank_table_")) for path in locals_)

    with GuideCluster(tmp_path, fake_model, flags=FAKE, tables=Tables(global_path, slipped)) as cluster:
        cluster.up()

        assert _complete(cluster)


@pytest.mark.long
def test_the_guides_json_with_localhost_starts(tmp_path: Path, fake_model: Path) -> None:
    tables = _guide_json(tmp_path)

    with GuideCluster(tmp_path, fake_model, flags=FAKE, tables=tables) as cluster:
        cluster.up()

        assert _complete(cluster)


@pytest.mark.covers("A8.103")
@pytest.mark.long
def test_node_ports_in_the_wrong_order_end_the_scheduler_naming_both(tmp_path: Path, fake_model: Path) -> None:
    with GuideCluster(tmp_path, fake_model, flags=FAKE) as cluster:
        cluster.start("prefill-0", "decode-0")
        wrong = ",".join(map(str, reversed(cluster.ports)))

        scheduler = cluster.start("scheduler", env={"NODE_PORTS": wrong})

        assert scheduler.wait() == 2
        assert "NODE_PORTS" in scheduler.log.splitlines()[-1]
        assert all(f"{devices}" in scheduler.log.splitlines()[-1] for devices in ("4", "6"))
        del cluster.processes["scheduler"]


@pytest.mark.long
def test_instances_of_different_dtypes_end_a_starting_scheduler(tmp_path: Path, fake_model: Path) -> None:
    with GuideCluster(tmp_path, fake_model, flags=FAKE) as cluster:
        cluster.start("prefill-0", flags=("--dtype=float32",))
        cluster.start("decode-0", flags=("--dtype=bfloat16",))

        scheduler = cluster.start("scheduler")

        assert scheduler.wait() == 2
        last = scheduler.log.splitlines()[-1]
        assert all(word in last for word in ("prefill", "decode", "float32", "bfloat16")), last
        del cluster.processes["scheduler"]


@pytest.mark.long
def test_a_serving_scheduler_refuses_a_different_new_instance(tmp_path: Path, fake_model: Path) -> None:
    with GuideCluster(tmp_path, fake_model, flags=(*FAKE, "--dtype=float32")) as cluster:
        cluster.up()
        cluster.kill("decode-0")

        cluster.start("decode-0", flags=("--dtype=bfloat16",))

        scheduler = cluster.processes["scheduler"]
        deadline = time.monotonic() + 300
        while "instance_refused" not in scheduler.log:
            assert scheduler.running, scheduler.log
            assert time.monotonic() < deadline, scheduler.log
            time.sleep(0.1)
        refusal = next(line for line in scheduler.log.splitlines() if "instance_refused" in line)
        assert "float32" in refusal
        assert "bfloat16" in refusal


@pytest.mark.long
def test_a_second_process_of_one_entry_is_refused_naming_both(tmp_path: Path, fake_model: Path) -> None:
    with GuideCluster(tmp_path, fake_model, flags=FAKE) as cluster:
        cluster.up()
        first = cluster.processes["decode-0"].pid
        (port,) = free_ports(1)

        second = cluster.start("decode-0", flags=(f"--port={port}",))

        assert second.wait() == 2
        assert str(first) in second.log.splitlines()[-1]
        assert str(second.pid) in second.log.splitlines()[-1]
        cluster.processes["decode-0"] = cluster.retired.pop()
        assert _complete(cluster)


@pytest.mark.parametrize(
    ("env", "flags", "words"),
    [
        ({"RANK_TABLE_FILE_PATH": ""}, (), "RANK_TABLE_FILE_PATH is not set"),
        ({}, ("--max-model-len=256", "--max-num-batched-tokens=128"), "--max-num-batched-tokens 128"),
        *(
            pytest.param(env, flags, words, marks=pytest.mark.long)
            for env, flags, words in (
                ({"GLOBAL_RANK_TABLE_FILE_PATH": "/no/table"}, (), "/no/table"),
                ({}, ("--tensor-parallel-size=4",), "--tensor-parallel-size 4 differs from the 2 devices"),
                ({}, ("--model=/no/model",), "/no/model"),
                ({}, ("--max-modellen=1",), "did you mean --max-model-len?"),
            )
        ),
    ],
)
def test_what_one_process_can_detect_alone_ends_it_with_one_line(
    tmp_path: Path, fake_model: Path, env: dict[str, str], flags: Sequence[str], words: str
) -> None:
    with GuideCluster(tmp_path, fake_model, flags=FAKE) as cluster:
        process = cluster.start("prefill-0", env=env, flags=flags)

        assert process.wait() == 2
        assert words in process.log.splitlines()[-1]
        assert "Traceback" not in process.log
        del cluster.processes["prefill-0"]


@pytest.mark.covers("A8.108")
def test_a_port_in_use_ends_the_new_process(fake_cluster: GuideCluster) -> None:
    tables = generate(fake_cluster.folder / "other", ("1",), ("2",), free_ports(2))
    env = {
        "GLOBAL_RANK_TABLE_FILE_PATH": str(tables.global_path),
        "RANK_TABLE_FILE_PATH": str(tables.local_paths[0]),
    }

    second = fake_cluster.start("prefill-0", env=env)

    assert second.wait() == 2
    assert f"--port {fake_cluster.ports[0]}" in second.log.splitlines()[-1]
    fake_cluster.processes["prefill-0"] = fake_cluster.retired.pop()


def _guide_json(folder: Path) -> Tables:
    """Write the guide's two examples, with real addresses in place of the masked ones."""
    prefill = _server([("4", "10.0.0.22"), ("5", "10.0.0.23")])
    decode = _server([("6", "29.0.0.56"), ("7", "29.0.0.72")])
    groups = [[_server([])], [prefill], [decode]]
    whole = {
        "version": "1.0",
        "status": "completed",
        "server_group_list": [
            {"group_id": str(number), "server_count": "1", "server_list": servers}
            for number, servers in enumerate(groups)
        ],
    }
    paths = []
    for name, server in (("45", prefill), ("67", decode), ("host", _server([]))):
        local = {"version": "1.0", "status": "completed", "group_id": "0", "server_count": "1", "server_list": [server]}
        paths.append(folder / f"local_{name}.json")
        paths[-1].write_text(json.dumps(local))
    (folder / "global.json").write_text(json.dumps(whole))
    return Tables(folder / "global.json", tuple(paths))


def _server(devices: Sequence[tuple[str, str]]) -> dict[str, object]:
    server: dict[str, object] = {"server_id": "localhost", "server_ip": "localhost"}
    if devices:
        server["device"] = [
            {"device_id": device_id, "device_ip": ip, "rank_id": str(rank)}
            for rank, (device_id, ip) in enumerate(devices)
        ]
    return server
