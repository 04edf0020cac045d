"""From the guide's variables to what one process runs as."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranktable_tools import cli
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.digest import table_digest
from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import LaunchPlan, core_share, resolve
from ranktable_tools.table_file import read_global
from tests.ranktable_tools.documents import A, local, modelarts, server

Document = dict[str, Any]
Save = Callable[[str, object], str]


@pytest.fixture
def environ(save: Save, guide_global: Document, guide_host: Document) -> dict[str, str]:
    """The environment of the guide's scheduler."""
    return {
        "GLOBAL_RANK_TABLE_FILE_PATH": save("global.json", guide_global),
        "RANK_TABLE_FILE_PATH": save("host.json", guide_host),
        "NODE_PORTS": "8088,8089",
        "USE_OPENAI": "1",
    }


@pytest.fixture
def two_by_two(tmp_path: Path) -> dict[str, str]:
    """The environment of a scheduler of 2P2D, without ports."""
    gen(GenArguments(["0", "1"], ["2", "3"], True, str(tmp_path), "10.0.0.18", None, "cpu"), lambda line: None, {})
    return {
        "GLOBAL_RANK_TABLE_FILE_PATH": str(tmp_path / "global_ranktable_10.0.0.18.json"),
        "RANK_TABLE_FILE_PATH": str(tmp_path / "local_ranktable_10.0.0.18_host.json"),
    }


def test_a_byte_order_mark_is_read_by_lint_and_start_alike(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [Path(environ[name]) for name in ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH")]
    for path in paths:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    assert cli.main(["lint", *map(str, paths)]) == 0
    assert resolve(environ).role == "scheduler"


def _refusal(environ: dict[str, str]) -> str:
    with pytest.raises(RanktableError) as caught:
        resolve(environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _addresses(plan: LaunchPlan) -> list[tuple[str, str, int, int]]:
    return [(each.role, each.host, each.port, each.index) for each in plan.instance_addresses]


def test_a_table_without_devices_is_the_scheduler(environ: dict[str, str]) -> None:
    plan = resolve(environ)

    assert (plan.role, plan.index, plan.own.devices) == ("scheduler", None, ())
    assert _addresses(plan) == [("prefill", "127.0.0.1", 8088, 0), ("decode", "127.0.0.1", 8089, 1)]
    assert (plan.use_openai, plan.notes, plan.warnings) == (True, (), ())
    assert plan.table_digest == table_digest(plan.global_table)


def test_the_guides_decode_table_is_the_decode_instance(
    environ: dict[str, str], save: Save, guide_local: Document
) -> None:
    plan = resolve({**environ, "RANK_TABLE_FILE_PATH": save("local.json", guide_local)})

    assert (plan.role, plan.index, plan.own.device_ids) == ("decode", 1, ("6", "7"))
    assert plan.instance_addresses == ()


def test_three_local_tables_give_three_roles_whatever_their_names(two_by_two: dict[str, str], tmp_path: Path) -> None:
    found = []
    for number in range(4):
        odd = tmp_path / f"host_{number}"
        (tmp_path / f"local_ranktable_10.0.0.18_{number}.json").rename(odd)
        plan = resolve({**two_by_two, "RANK_TABLE_FILE_PATH": str(odd)})
        found.append((plan.role, plan.index))

    assert found == [("prefill", 0), ("prefill", 1), ("decode", 2), ("decode", 3)]


@pytest.mark.parametrize("name", ["127.0.0.1", "::1"])
def test_a_local_table_may_name_this_host_in_another_way(
    environ: dict[str, str], save: Save, guide_local: Document, name: str
) -> None:
    guide_local["server_list"][0]["server_ip"] = name

    assert resolve({**environ, "RANK_TABLE_FILE_PATH": save("local.json", guide_local)}).role == "decode"


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("variable", ["GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"])
def test_a_missing_variable_is_named_with_advice(environ: dict[str, str], variable: str, value: str | None) -> None:
    del environ[variable]
    if value is not None:
        environ[variable] = value

    assert _refusal(environ).startswith(f"{variable} is not set: set it to the path of ")


@pytest.mark.parametrize("variable", ["GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"])
def test_a_bad_file_is_named_with_its_variable(environ: dict[str, str], save: Save, variable: str) -> None:
    gone = _refusal({**environ, variable: "/none.json"})
    text = save("text.json", "hello")
    garbled = _refusal({**environ, variable: text})

    assert gone == f"{variable}: /none.json: cannot be read: No such file or directory"
    assert garbled == f"{variable}: {text}: not JSON: line 1 column 1: Expecting value"


@pytest.mark.parametrize(
    ("written", "requested"),
    [
        ("local_ranktable_10.0.0.18_host.json", "local_rank_table_10.0.0.18_host.json"),
        ("local_rank_table_10.0.0.18_host.json", "local_ranktable_10.0.0.18_host.json"),
    ],
)
def test_the_guides_typo_in_the_file_name_is_corrected_with_a_note(
    environ: dict[str, str], save: Save, guide_host: Document, written: str, requested: str
) -> None:
    path = save(written, guide_host)
    environ["RANK_TABLE_FILE_PATH"] = path.replace(written, requested)

    plan = resolve(environ)

    assert plan.local_path == path
    assert plan.notes == (f"RANK_TABLE_FILE_PATH: there is no {environ['RANK_TABLE_FILE_PATH']}; read {path}",)


def test_a_different_device_address_is_reported_with_both_values(
    environ: dict[str, str], save: Save, guide_local: Document
) -> None:
    guide_local["server_list"][0]["device"][1]["device_ip"] = "29.0.0.99"
    path = save("local.json", guide_local)

    message = _refusal({**environ, "RANK_TABLE_FILE_PATH": path})

    assert message == (
        f"RANK_TABLE_FILE_PATH: {path} is not in the global table; the nearest entry is decode-0 "
        '(server_group_list[2].server_list[0]): server_list[0].device[1].device_ip is "29.0.0.99" here and '
        f'"29.0.0.72" there ({environ["GLOBAL_RANK_TABLE_FILE_PATH"]})'
    )


def test_a_table_of_other_devices_names_the_nearest_entry(
    environ: dict[str, str], save: Save, guide_local: Document
) -> None:
    guide_local["server_list"][0]["device"][1]["device_id"] = "9"

    message = _refusal({**environ, "RANK_TABLE_FILE_PATH": save("local.json", guide_local)})

    assert "nearest entry is decode-0 (server_group_list[2].server_list[0]): the device_id list is " in message
    assert '["6", "9"] here and ["6", "7"] there' in message


def test_swapped_ranks_are_reported(environ: dict[str, str], save: Save, guide_local: Document) -> None:
    first, second = guide_local["server_list"][0]["device"]
    first["rank_id"], second["rank_id"] = "1", "0"

    message = _refusal({**environ, "RANK_TABLE_FILE_PATH": save("local.json", guide_local)})

    assert 'server_list[0].device[0].rank_id is "1" here and "0" there' in message


def test_a_table_of_another_host_is_reported(environ: dict[str, str], save: Save, guide_local: Document) -> None:
    guide_local["server_list"][0]["server_ip"] = "10.99.0.7"

    message = _refusal({**environ, "RANK_TABLE_FILE_PATH": save("local.json", guide_local)})

    assert 'decode-0 (server_group_list[2].server_list[0]): server_list[0].server_ip is "10.99.0.7"' in message


def test_a_scheduler_of_another_host_is_reported(environ: dict[str, str], save: Save, guide_host: Document) -> None:
    guide_host["server_list"][0]["server_ip"] = "10.99.0.7"

    message = _refusal({**environ, "RANK_TABLE_FILE_PATH": save("host2.json", guide_host)})

    assert "has no device, so it is the scheduler's, but the global table's scheduler" in message
    assert 'server_list[0].server_ip is "10.99.0.7" here and "localhost" there' in message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "NODE_PORTS is empty: write one port per instance, like 8088,8089"),
        ("8088", 'NODE_PORTS is "8088": 1 port, but the global table has 2 instances (1 prefill, 1 decode)'),
        (
            "8088,8089,8090",
            'NODE_PORTS is "8088,8089,8090": 3 ports, but the global table has 2 instances (1 prefill, 1 decode)',
        ),
        ("8088,x", 'NODE_PORTS is "8088,x": "x" is not a port from 1 to 65535'),
        ("8088,", 'NODE_PORTS is "8088,": "" is not a port from 1 to 65535'),
        ("8088,0", 'NODE_PORTS is "8088,0": "0" is not a port from 1 to 65535'),
        ("8088,65536", 'NODE_PORTS is "8088,65536": "65536" is not a port from 1 to 65535'),
        (
            "8088,8088",
            'NODE_PORTS is "8088,8088": port 8088 occurs twice on localhost, for prefill-0 and decode-0',
        ),
    ],
)
def test_wrong_node_ports_are_named_with_their_value(environ: dict[str, str], value: str, message: str) -> None:
    assert _refusal({**environ, "NODE_PORTS": value}) == message


def test_one_port_on_two_hosts_is_fine(
    environ: dict[str, str], save: Save, guide_global: Document, guide_host: Document
) -> None:
    for group, address in enumerate(("10.99.0.8", "10.99.0.8", "10.99.0.9")):
        guide_global["server_group_list"][group]["server_list"][0]["server_ip"] = address
    guide_host["server_list"][0]["server_ip"] = "10.99.0.8"
    environ["GLOBAL_RANK_TABLE_FILE_PATH"] = save("g2.json", guide_global)
    environ["RANK_TABLE_FILE_PATH"] = save("h2.json", guide_host)

    plan = resolve({**environ, "NODE_PORTS": "8088,8088"})

    assert _addresses(plan) == [("prefill", "10.99.0.8", 8088, 0), ("decode", "10.99.0.9", 8088, 1)]


def test_two_instances_of_one_gpu_start_if_allowed(save: Save) -> None:
    shared = modelarts([server(A, 0, server_port="8088")], [server(A, 0, server_port="8089")])
    environ = {
        "GLOBAL_RANK_TABLE_FILE_PATH": save("g.json", shared),
        "RANK_TABLE_FILE_PATH": save("l.json", local(server(A, 0, server_port="8089"))),
    }

    assert resolve(environ, share_devices=True).role == "decode"
    assert "A device_id can be used only once" in _refusal(environ)


def test_an_instance_ignores_the_schedulers_variables(
    environ: dict[str, str], save: Save, guide_local: Document
) -> None:
    local = save("local.json", guide_local)

    plan = resolve({**environ, "RANK_TABLE_FILE_PATH": local, "NODE_PORTS": "nonsense", "USE_OPENAI": "maybe"})

    assert plan.role == "decode"


def test_node_ports_take_precedence_over_the_tables_ports(
    environ: dict[str, str], save: Save, guide_global: Document
) -> None:
    for group, port in ((1, "7001"), (2, "7002")):
        guide_global["server_group_list"][group]["server_list"][0]["server_port"] = port
    environ["GLOBAL_RANK_TABLE_FILE_PATH"] = save("g2.json", guide_global)
    with_node_ports = resolve(environ)
    del environ["NODE_PORTS"]

    assert [address.port for address in with_node_ports.instance_addresses] == [8088, 8089]
    assert [address.port for address in resolve(environ).instance_addresses] == [7001, 7002]


def test_a_workers_url_takes_precedence_over_node_ports(
    environ: dict[str, str], save: Save, guide_global: Document
) -> None:
    entry = guide_global["server_group_list"][2]["server_list"][0]
    entry.update(worker="vllm", url="http://192.0.2.9:8101")
    del entry["device"]
    environ["GLOBAL_RANK_TABLE_FILE_PATH"] = save("global.json", guide_global)

    expected = [("prefill", "127.0.0.1", 8088, 0), ("decode", "192.0.2.9", 8101, 1)]
    assert _addresses(resolve(environ)) == expected
    del environ["NODE_PORTS"]
    assert _addresses(resolve(environ)) == expected[1:]


def test_an_entry_without_a_port_is_left_out_with_a_warning(two_by_two: dict[str, str]) -> None:
    path = Path(two_by_two["GLOBAL_RANK_TABLE_FILE_PATH"])
    document = json.loads(path.read_text())
    document["server_group_list"][1]["server_list"][1]["server_port"] = "8089"
    document["server_group_list"][2]["server_list"][0]["server_port"] = "8090"
    path.write_text(json.dumps(document))

    plan = resolve(two_by_two)

    assert [(address.port, address.index) for address in plan.instance_addresses] == [(8089, 1), (8090, 2)]
    assert plan.warnings == (
        "prefill-0 on 10.0.0.18 is ignored: server_group_list[1].server_list[0] of the global table has no "
        "server_port and NODE_PORTS is not set",
        "decode-1 on 10.0.0.18 is ignored: server_group_list[2].server_list[1] of the global table has no "
        "server_port and NODE_PORTS is not set",
    )


def test_a_missing_port_suggests_node_ports(two_by_two: dict[str, str]) -> None:
    message = _refusal(two_by_two)

    assert message.startswith("NODE_PORTS is not set and no entry of the global table has a server_port: set ")
    assert message.endswith("of each of the 4 instances in table order, like NODE_PORTS=8088,8089,8090,8091")


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_use_openai_is_one_unless_zero(environ: dict[str, str], value: str | None, expected: bool) -> None:
    del environ["USE_OPENAI"]
    if value is not None:
        environ["USE_OPENAI"] = value

    assert resolve(environ).use_openai is expected


@pytest.mark.parametrize("value", ["", "2", "true"])
def test_another_use_openai_is_refused(environ: dict[str, str], value: str) -> None:
    message = _refusal({**environ, "USE_OPENAI": value})

    words = "must be 1 (the OpenAI API, the default) or 0 (/generate)"
    assert message == f'USE_OPENAI is "{value}": {words}'


def test_the_digest_ignores_ports_layout_and_localhost_spellings(
    environ: dict[str, str], save: Save, guide_global: Document
) -> None:
    digest = resolve(environ).table_digest
    server = guide_global["server_group_list"][1]["server_list"][0]
    server.update(server_port="8088", server_ip="127.0.0.1")
    other = read_global(save("g2.json", json.dumps(guide_global, indent=1)))

    assert table_digest(other) == digest
    assert len(digest) == 16
    assert int(digest, 16) >= 0


@pytest.mark.parametrize(("key", "value"), [("device_id", "9"), ("device_ip", "10.0.0.99")])
def test_the_digest_changes_with_the_members(
    environ: dict[str, str], save: Save, guide_global: Document, key: str, value: str
) -> None:
    guide_global["server_group_list"][1]["server_list"][0]["device"][0][key] = value

    assert table_digest(read_global(save("g2.json", guide_global))) != resolve(environ).table_digest


def test_the_plan_assigns_cores(environ: dict[str, str], save: Save, guide_local: Document) -> None:
    plan = resolve({**environ, "RANK_TABLE_FILE_PATH": save("local.json", guide_local)})

    assert core_share(plan.global_table, plan.own, {"localhost"}, range(16)).cores == tuple(range(8, 16))


def test_swapped_global_and_local_tables_are_reported(environ: dict[str, str]) -> None:
    table, host = environ["GLOBAL_RANK_TABLE_FILE_PATH"], environ["RANK_TABLE_FILE_PATH"]

    assert _refusal({**environ, "GLOBAL_RANK_TABLE_FILE_PATH": host}) == (
        f"GLOBAL_RANK_TABLE_FILE_PATH: {host}: is a local table, with server_list; "
        "a global table is needed here, with server_group_list"
    )
    assert _refusal({**environ, "RANK_TABLE_FILE_PATH": table}) == (
        f"RANK_TABLE_FILE_PATH: {table}: is a global table, with server_group_list; "
        "a local table is needed here, with server_list"
    )
