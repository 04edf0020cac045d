"""A started process prints its ports, its devices and the next step."""

from dataclasses import replace
from pathlib import Path

import pytest

from flags.options import EngineOptions
from instance.config import InstanceConfig
from instance.kv_address import kv_host
from pdserve.start_lines import instance_lines, scheduler_lines
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.launch_plan import LaunchPlan, resolve
from wire.types import Role


def _plan(folder: Path, member: int | None, ports: str | None = "8088,8089", address: str = "10.0.0.18") -> LaunchPlan:
    made = gen(GenArguments(["4,5"], ["6,7"], True, str(folder), address, ports, "cpu"), lambda line: None, {})
    local = made.host if member is None else made.instances[member]
    assert local is not None
    return resolve(
        {
            "GLOBAL_RANK_TABLE_FILE_PATH": str(folder / made.global_name),
            "RANK_TABLE_FILE_PATH": str(folder / local.file_name),
        }
    )


def _config(**flags: object) -> InstanceConfig:
    options = EngineOptions(**{"model": "m", "host": "0.0.0.0", "port": 8089, **flags})  # type: ignore[arg-type]
    return InstanceConfig(options, Role.DECODE, "10.0.0.18", ("6", "7"), cores=(2, 3))


def test_an_instance_prints_ports_devices_and_the_next_step(tmp_path: Path) -> None:
    config = _config()

    lines = instance_lines(config, _plan(tmp_path, 1, ports=None), kv_host(config), None, {})

    assert lines == (
        "ports: control 0.0.0.0:8089, KV any free port of 10.0.0.18, /health and /metrics off (--http-port)",
        "devices: rank 0 = device 6, rank 1 = device 7 on CPU cores 2,3",
        "next: start the other instances and the scheduler, whose NODE_PORTS has 8089 as number 2 of 2; "
        "`pdserve status --url http://10.0.0.18:PORT`, at the scheduler's --port, shows them",
    )


def test_the_next_step_has_the_schedulers_port_of_the_table(tmp_path: Path) -> None:
    plan = _plan(tmp_path, 1)
    scheduler = replace(plan.global_table.scheduler, server_port=9100)
    plan = replace(plan, global_table=replace(plan.global_table, scheduler=scheduler))

    lines = instance_lines(_config(), plan, "10.0.0.18", None, {})

    assert lines[-1].endswith("; `pdserve status --url http://10.0.0.18:9100` shows them")


def test_flags_change_the_start_lines(tmp_path: Path) -> None:
    config = _config(http_port=9100, kv_port_range="20000-20001", kv_ip="10.0.1.18")

    lines = instance_lines(
        config, _plan(tmp_path, 1), kv_host(config), "devices: rank 0 = device 6 on 2", {"HCCL_IF_IP": "10.0.1.18"}
    )

    assert lines[0] == ("ports: control 0.0.0.0:8089, KV 20000-20001 of 10.0.1.18, /health and /metrics 0.0.0.0:9100")
    assert lines[3] == (
        "next: start the other instances and the scheduler; `pdserve status --url http://10.0.0.18:PORT`, "
        "at the scheduler's --port, shows them"
    )
    assert lines[1:3] == ("devices: rank 0 = device 6 on 2", "network: HCCL_IF_IP=10.0.1.18")
    shm = instance_lines(_config(kv_transport=("shm",)), _plan(tmp_path, 1), "", None, {})
    assert "KV none (shm)," in shm[0]


@pytest.mark.parametrize(
    ("host", "server_ip"), [("127.0.0.1", "10.0.0.18"), ("::1", "10.0.0.18"), ("10.0.1.18", "10.0.0.18")]
)
def test_an_instance_at_another_address_than_the_tables_is_warned(tmp_path: Path, host: str, server_ip: str) -> None:
    config = _config(host=host)

    lines = instance_lines(config, _plan(tmp_path, 1, address=server_ip), kv_host(config), None, {})

    assert [line for line in lines if line.startswith("warning: ")] == [
        f"warning: --host {host} does not listen on {server_ip}, the address in the table, to which the "
        f"scheduler connects: set --host {server_ip} or --host 0.0.0.0, unless a proxy or a network namespace is "
        "between"
    ]


@pytest.mark.parametrize(
    ("host", "server_ip"),
    [("0.0.0.0", "10.0.0.18"), ("::", "fd00::2"), ("10.0.0.18", "10.0.0.18"), ("fd00:0::2", "fd00::2"),
     ("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("node-1", "10.0.0.18")],
)  # fmt: skip
def test_an_instance_at_the_tables_address_is_not_warned(tmp_path: Path, host: str, server_ip: str) -> None:
    config = _config(host=host)

    lines = instance_lines(config, _plan(tmp_path, 1, address=server_ip), kv_host(config), None, {})

    assert not [line for line in lines if line.startswith("warning: ")]


def test_an_ipv6_scheduler_is_in_brackets(tmp_path: Path) -> None:
    config = _config()

    lines = instance_lines(config, _plan(tmp_path, 1, address="fd00::2"), kv_host(config), None, {})

    assert "`pdserve status --url http://[fd00::2]:PORT`, at the scheduler's --port, shows them" in lines[-1]


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", "10.0.0.18:9000"), ("127.0.0.1", "127.0.0.1:9000")])
def test_the_scheduler_prints_missing_instances_and_its_url(tmp_path: Path, host: str, reached: str) -> None:
    engine = replace(EngineOptions(), host=host, port=9000)

    lines = scheduler_lines(engine, _plan(tmp_path, None))

    assert lines == (
        f"ports: OpenAI API {host}:9000",
        "devices: none",
        "next: it waits for prefill-0 10.0.0.18:8088, decode-0 10.0.0.18:8089; once it is ready, try: "
        f"curl http://{reached}/v1/models",
    )


def test_a_use_openai_0_scheduler_prints_its_routes(tmp_path: Path) -> None:
    engine = replace(EngineOptions(), host="127.0.0.1", port=9000)

    first, _, last = scheduler_lines(engine, replace(_plan(tmp_path, None), use_openai=False))

    assert first == "ports: /generate 127.0.0.1:9000"
    assert last.endswith("try: curl http://127.0.0.1:9000/health")
