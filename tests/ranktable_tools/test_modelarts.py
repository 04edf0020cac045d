"""The guide's dialect: what is read, what is refused with which message, and what is written byte by byte."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranktable_tools.dialects.modelarts import global_text, local_text
from ranktable_tools.digest import table_digest
from ranktable_tools.errors import RanktableError
from ranktable_tools.table_file import examine_global, read_global, read_local, read_part
from ranktable_tools.tables import GlobalTable, LocalTable, TableDevice, TableServer
from ranktable_tools.worker_urls import listed_port, worker_url

Document = dict[str, Any]
Save = Callable[[str, object], str]

PREFILL = TableServer(
    "localhost", "localhost", (TableDevice("4", "10.0.0.22", "0"), TableDevice("5", "10.0.0.23", "1"))
)
DECODE = TableServer("localhost", "localhost", (TableDevice("6", "29.0.0.56", "0"), TableDevice("7", "29.0.0.72", "1")))
HOST = TableServer("localhost", "localhost")


def _refusal(path: str) -> str:
    with pytest.raises(RanktableError) as caught:
        read_global(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def _group(document: Document, index: int) -> Document:
    group: Document = document["server_group_list"][index]
    return group


def _device(document: Document, group: int, device: int) -> Document:
    found: Document = _group(document, group)["server_list"][0]["device"][device]
    return found


def test_the_guides_global_example_reads(save: Save, guide_global: Document) -> None:
    table = read_global(save("g.json", guide_global))

    assert table == GlobalTable(HOST, (PREFILL,), (DECODE,))


def test_the_guides_local_example_reads(save: Save, guide_local: Document) -> None:
    assert read_local(save("l.json", guide_local)) == LocalTable(DECODE)


def test_an_integer_server_count_and_unknown_keys_are_accepted(save: Save, guide_global: Document) -> None:
    _group(guide_global, 1)["server_count"] = 1
    guide_global["hardware_type"] = "800I-A2-32G"

    assert read_global(save("g.json", guide_global)).prefill == (PREFILL,)


def test_server_port_is_read_from_a_string(save: Save, guide_global: Document) -> None:
    _group(guide_global, 2)["server_list"][0]["server_port"] = "8089"

    assert read_global(save("g.json", guide_global)).decode[0].server_port == 8089


@pytest.mark.parametrize(
    ("keys", "worker", "url", "port"),
    [
        ({"worker": "vllm", "server_port": "8101"}, "vllm", None, 8101),
        ({"worker": "vllm-ascend", "url": "http://192.0.2.9:8102"}, "vllm-ascend", "http://192.0.2.9:8102", 8102),
        ({"worker": "vllm", "url": "http://[2001:db8::1]:80"}, "vllm", "http://[2001:db8::1]:80", 80),
        ({"worker": "vllm", "url": "http://node-1.example:65535"}, "vllm", "http://node-1.example:65535", 65535),
        ({}, None, None, None),
    ],
)
def test_a_worker_of_another_engine_reads_and_writes_back(
    save: Save, guide_global: Document, keys: dict[str, str], worker: str | None, url: str | None, port: int | None
) -> None:
    entry = _group(guide_global, 2)["server_list"][0]
    entry.update(keys)
    if worker is not None:
        del entry["device"]  # a worker that is already running

    table = read_global(save("g.json", guide_global))

    found = table.decode[0]
    assert (found.worker, found.url, listed_port(found)) == (worker, url, port)
    assert json.loads(global_text(table)) == guide_global


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("http://h", "http://h:80"),
        ("https://h/", "https://h:443"),
        ("HTTPS://Node-1.Example:8443/", "https://node-1.example:8443"),
        ("http://[2001:DB8::1]", "http://[2001:db8::1]:80"),
        ("http://h:", None),
        ("http://h:080", None),
        ("http://h:65536", None),
        ("http://h\n:1", None),
        ("http://1.2.3:1", None),
        ("http://h:1//", None),
        ("h:1", None),
    ],
)
def test_a_workers_url_has_one_form(text: str, found: str | None) -> None:
    if found is not None:
        assert worker_url(text) == found
        return
    with pytest.raises(ValueError, match="must be "):
        worker_url(text)


def test_a_worker_changes_the_digest_and_its_url_too(save: Save, guide_global: Document) -> None:
    digests = []
    for keys in ({}, {"worker": "vllm"}, {"worker": "vllm-ascend"}, {"url": "http://192.0.2.9:8102"}):
        _group(guide_global, 2)["server_list"][0].update(keys)
        digests.append(table_digest(read_global(save("g.json", guide_global))))

    assert len(set(digests)) == 4


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_a_wrong_group_count_is_named(save: Save, guide_global: Document, count: int) -> None:
    groups = (guide_global["server_group_list"] * 2)[:count]
    guide_global["server_group_list"] = groups

    message = _refusal(save("g.json", guide_global))

    groups_found = f"{count} group" if count == 1 else f"{count} groups"
    assert message.startswith(f"server_group_list has {groups_found}; must have 3: 0 (scheduler), ")


def test_two_schedulers_are_refused(save: Save, guide_global: Document) -> None:
    group = _group(guide_global, 0)
    group.update(server_count="2", server_list=group["server_list"] * 2)

    message = _refusal(save("g.json", guide_global))

    assert message == "server_group_list[0] has 2 schedulers; must have 1"


def test_a_scheduler_with_a_device_is_refused(save: Save, guide_global: Document) -> None:
    group = _group(guide_global, 0)
    group["server_list"][0]["device"] = [{"device_id": "9", "device_ip": "10.0.0.1", "rank_id": "0"}]

    message = _refusal(save("g.json", guide_global))

    assert message == 'server_group_list[0].server_list[0].device is ["9"]; must be absent: the scheduler has no device'


def test_swapped_group_ids_are_refused(save: Save, guide_global: Document) -> None:
    _group(guide_global, 1)["group_id"] = "2"
    _group(guide_global, 2)["group_id"] = "1"

    message = _refusal(save("g.json", guide_global))

    assert message.startswith('server_group_list[2].group_id is "1"; must be absent: all groups come before it; ')


def test_an_unknown_group_id_is_refused_with_the_valid_ones(save: Save, guide_global: Document) -> None:
    _group(guide_global, 1)["group_id"] = "7"

    message = _refusal(save("g.json", guide_global))

    assert message.startswith('server_group_list[1].group_id is "7"; must be "1" or "2"; the groups are 0 (scheduler)')


@pytest.mark.parametrize(("count", "shown"), [("2", '"2"'), (3, "3"), (True, "true"), ("01", '"01"')])
def test_a_wrong_server_count_is_reported_with_both_numbers(
    save: Save, guide_global: Document, count: object, shown: str
) -> None:
    _group(guide_global, 1)["server_count"] = count

    message = _refusal(save("g.json", guide_global))

    place = "server_group_list[1].server_count"
    assert message == f'{place} is {shown}; must be "1", the number of servers in server_list'


def test_a_duplicate_device_is_named_with_both_places(save: Save, guide_global: Document) -> None:
    _device(guide_global, 2, 1)["device_id"] = "4"

    message = _refusal(save("g.json", guide_global))

    assert message == (
        'server_group_list[2].server_list[0].device[1].device_id is "4" on localhost, as '
        "server_group_list[1].server_list[0].device[0].device_id is; "
        "A device_id can be used only once in prefill server and decode server."
    )


def test_the_same_device_id_on_two_hosts_is_fine(save: Save, guide_global: Document) -> None:
    _device(guide_global, 2, 1)["device_id"] = "4"
    for group in range(3):
        _group(guide_global, group)["server_list"][0]["server_ip"] = f"10.99.0.{group}"

    assert read_global(save("g.json", guide_global)).decode[0].device_ids == ("6", "4")


@pytest.mark.parametrize("other", ["127.0.0.1", "::1"])
def test_localhost_and_its_addresses_are_one_host_for_devices(save: Save, guide_global: Document, other: str) -> None:
    _device(guide_global, 2, 0)["device_id"] = "5"
    _group(guide_global, 2)["server_list"][0]["server_ip"] = other

    assert f'is "5" on {other}, as server_group_list[1]' in _refusal(save("g.json", guide_global))


@pytest.mark.parametrize("ranks", [("0", "2"), ("1", "2"), ("0", "0")])
def test_rank_ids_with_a_gap_are_refused(save: Save, guide_global: Document, ranks: tuple[str, str]) -> None:
    for device, rank in enumerate(ranks):
        _device(guide_global, 1, device)["rank_id"] = rank

    message = _refusal(save("g.json", guide_global))

    assert message == (
        f'server_group_list[1].server_list[0].device has the rank_ids ["{ranks[0]}", "{ranks[1]}"]; '
        'must be ["0", "1"]: from 0, without a gap, each once'
    )


@pytest.mark.parametrize("key", ["version", "status", "server_group_list"])
def test_a_missing_key_at_the_top_is_named(save: Save, guide_global: Document, key: str) -> None:
    del guide_global[key]

    assert _refusal(save("g.json", guide_global)).startswith(f"{key} is missing; write a ")


@pytest.mark.parametrize("key", ["device_id", "device_ip", "rank_id"])
def test_a_missing_key_of_a_device_is_named(save: Save, guide_global: Document, key: str) -> None:
    del _device(guide_global, 1, 1)[key]

    message = _refusal(save("g.json", guide_global))

    assert message == f"server_group_list[1].server_list[0].device[1].{key} is missing; write a string"


def test_an_instance_without_devices_is_refused(save: Save, guide_global: Document) -> None:
    del _group(guide_global, 1)["server_list"][0]["device"]

    message = _refusal(save("g.json", guide_global))

    assert message == "server_group_list[1].server_list[0].device is missing; list the devices of this instance"


@pytest.mark.parametrize(
    ("key", "value", "shown", "advice"),
    [
        ("device_id", 4, "4", "must be a string"),
        ("device_id", "four", '"four"', 'must be a whole number as a string, like "4"'),
        ("device_id", "04", '"04"', 'must be a whole number as a string, like "4"'),
        ("rank_id", None, "null", "must be a string"),
        ("device_ip", "10.**.**.22", '"10.**.**.22"', "that is a masked address: write the real one"),
        ("device_ip", "10.0.0.999", '"10.0.0.999"', "that is not an address or host name"),
        ("device_ip", "", '""', "that is not an address or host name"),
    ],
)
def test_a_wrong_value_of_a_device_is_named(
    save: Save, guide_global: Document, key: str, value: object, shown: str, advice: str
) -> None:
    _device(guide_global, 1, 0)[key] = value

    message = _refusal(save("g.json", guide_global))

    assert message == f"server_group_list[1].server_list[0].device[0].{key} is {shown}; {advice}"


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("server_ip", "10.**.**.18", "that is a masked address: write the real one"),
        ("server_id", "10.**.**.18", "that is a masked address: write the real one"),
        ("server_ip", "0.0.0.0", "that is an address to listen on, not one to reach a host at"),
        ("server_ip", "a host", "that is not an address or host name"),
        ("server_id", " ", "must not be empty"),
        ("server_port", "0", 'must be a port from "1" to "65535"'),
        ("server_port", "65536", 'must be a port from "1" to "65535"'),
    ],
)
def test_a_wrong_value_of_a_server_is_named(
    save: Save, guide_global: Document, key: str, value: str, advice: str
) -> None:
    _group(guide_global, 1)["server_list"][0][key] = value

    message = _refusal(save("g.json", guide_global))

    assert message == f'server_group_list[1].server_list[0].{key} is "{value}"; {advice}'


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", "2.0", 'version is "2.0"; must be "1.0"'),
        ("version", 1.0, "version is 1.0; must be a string"),
        ("status", "done", 'status is "done"; must be "completed"'),
        (
            "status",
            "initializing",
            'status is "initializing"; must be "completed": the table is not complete yet, wait for its writer',
        ),
        ("server_group_list", {}, "server_group_list is {}; must be a list"),
    ],
)
def test_a_wrong_value_at_the_top_is_named(
    save: Save, guide_global: Document, key: str, value: object, message: str
) -> None:
    guide_global[key] = value

    assert _refusal(save("g.json", guide_global)) == message


@pytest.mark.parametrize("document", [[], "text", 3, None])
def test_anything_but_an_object_is_refused(save: Save, document: object) -> None:
    assert "must be an object" in _refusal(save("g.json", document if document != "text" else '"text"'))


def test_an_empty_group_and_an_empty_device_list_are_refused(save: Save, guide_global: Document) -> None:
    _group(guide_global, 1).update(server_count="0", server_list=[])
    _group(guide_global, 2)["server_list"][0]["device"] = []

    problems, table = examine_global(save("g.json", guide_global))

    assert table is None
    assert [str(problem) for problem in problems] == [
        "server_group_list[1].server_list is []; must contain a server",
        "server_group_list[2].server_list[0].device is []; must contain a device, or be absent",
    ]


def test_one_port_twice_on_one_host_is_refused(save: Save, guide_global: Document) -> None:
    for group in (1, 2):
        _group(guide_global, group)["server_list"][0]["server_port"] = "8088"

    assert "server_port names port 8088 on localhost, as server_group_list[1]" in _refusal(save("g.json", guide_global))


def test_all_errors_are_found_and_the_first_counts_the_rest(save: Save, guide_global: Document) -> None:
    guide_global["version"] = "9"
    _device(guide_global, 1, 0)["rank_id"] = 0
    _group(guide_global, 2)["server_count"] = "5"
    path = save("g.json", guide_global)

    assert len(examine_global(path)[0]) == 3
    assert _refusal(path) == f'version is "9"; must be "1.0" (and 2 more: ranktable lint {path})'


def test_a_partial_table_may_lack_groups_but_not_repeat_them(save: Save, guide_global: Document) -> None:
    groups = guide_global["server_group_list"]
    part = read_part(save("part.json", {**guide_global, "server_group_list": groups[2:]}))
    twice = save("twice.json", {**guide_global, "server_group_list": [groups[2], groups[2]]})

    assert (part.scheduler, part.prefill, part.decode) == (None, (), (DECODE,))
    with pytest.raises(RanktableError, match=r'server_group_list\[1\].group_id is "2"; must be absent'):
        read_part(twice)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_id": "1"}, 'group_id is "1"; must be "0" in a local table'),
        ({"server_count": "2"}, 'server_count is "2"; must be "1", the number of servers in server_list'),
        ({"server_count": "0", "server_list": []}, "server_list is []; must contain a server"),
        ({"server_list": None}, "server_list is null; must be a list"),
    ],
)
def test_a_wrong_local_table_is_refused(save: Save, guide_local: Document, change: Document, message: str) -> None:
    path = save("l.json", {**guide_local, **change})

    with pytest.raises(RanktableError) as caught:
        read_local(path)

    assert str(caught.value) == f"{path}: {message}"


def test_a_local_table_of_two_servers_is_refused(save: Save, guide_local: Document) -> None:
    guide_local.update(server_count="2", server_list=guide_local["server_list"] * 2)

    with pytest.raises(
        RanktableError, match="server_list has 2 servers, localhost and localhost; must have 1, because pdserve"
    ):
        read_local(save("l.json", guide_local))


def test_a_local_table_is_written_byte_by_byte() -> None:
    text = local_text(LocalTable(TableServer("10.0.0.18", "10.0.0.18", (TableDevice("6", "29.0.0.56", "0"),), 8089)))

    assert (
        text
        == """{
    "version": "1.0",
    "status": "completed",
    "group_id": "0",
    "server_count": "1",
    "server_list": [
        {
            "server_id": "10.0.0.18",
            "server_ip": "10.0.0.18",
            "server_port": "8089",
            "device": [
                {
                    "device_id": "6",
                    "device_ip": "29.0.0.56",
                    "rank_id": "0"
                }
            ]
        }
    ]
}
"""
    )


def test_a_global_table_is_written_as_the_guide_has_it(save: Save, guide_global: Document) -> None:
    path = save("g.json", global_text(GlobalTable(HOST, (PREFILL,), (DECODE,))))

    assert Path(path).read_text() == json.dumps(guide_global, indent=4) + "\n"
