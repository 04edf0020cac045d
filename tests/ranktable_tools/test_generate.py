"""What gen generates from its arguments."""

from dataclasses import replace

import pytest

from ranktable_tools.errors import RanktableError
from ranktable_tools.generate import (
    GenRequest,
    build,
    check_request,
    parse_device_lists,
    parse_ports,
    tensor_parallel_note,
)
from ranktable_tools.tables import TableDevice

IP = "10.0.0.18"


def _request(prefill: str, decode: str, *, ip: str = IP, ports: tuple[int, ...] = ()) -> GenRequest:
    lists = [parse_device_lists(f"--{role}-server-list", [text]) for role, text in (("p", prefill), ("d", decode))]
    return GenRequest(lists[0], lists[1], with_scheduler=True, ip=ip, ports=ports)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["4,5"], (("4", "5"),)),
        (["0", "1"], (("0",), ("1",))),
        (["0,1", "2,3"], (("0", "1"), ("2", "3"))),
        (["0,1 2,3"], (("0", "1"), ("2", "3"))),
        ([], ()),
    ],
)
def test_spaces_separate_instances_and_commas_devices(values: list[str], expected: tuple[tuple[str, ...], ...]) -> None:
    assert parse_device_lists("--prefill-server-list", values) == expected


@pytest.mark.parametrize("value", ["4,", ",", "a", "4,-1", "4;5", "4.5", "\u0664"])
def test_a_malformed_list_names_flag_and_value(value: str) -> None:
    with pytest.raises(RanktableError) as caught:
        parse_device_lists("--decode-server-list", ["0", value])

    assert str(caught.value).startswith(f"Input format error. --decode-server-list has {value!r}; write device ids ")


@pytest.mark.parametrize("values", [[""], [" "], ["", "5"], ["4,5", ""]])
def test_an_empty_list_as_of_an_unset_variable_is_refused(values: list[str]) -> None:
    with pytest.raises(RanktableError) as caught:
        parse_device_lists("--prefill-server-list", values)

    assert str(caught.value) == (
        f"Input format error. --prefill-server-list has {' ' if values == [' '] else ''!r}, an empty list; "
        "write device ids like 4,5 6,7, or omit the flag"
    )


def test_the_files_of_one_host_have_the_guides_names() -> None:
    request = _request("4,5", "6,7")

    generated = build(request, dict.fromkeys(request.device_ids, IP))

    assert generated.global_name == "global_ranktable_10.0.0.18.json"
    assert [local.file_name for local in generated.locals] == [
        "local_ranktable_10.0.0.18_45.json",
        "local_ranktable_10.0.0.18_67.json",
        "local_ranktable_10.0.0.18_host.json",
    ]


def test_local_tables_are_the_entries_of_the_global_one_in_order() -> None:
    request = _request("0 1", "2 3", ports=(8088, 8089, 8090, 8091))

    generated = build(request, {"0": "10.1.0.0", "1": "10.1.0.1", "2": "10.1.0.2", "3": "10.1.0.3"})

    servers = [instance.server for instance in generated.part.instances]
    assert [local.table.server for local in generated.instances] == servers
    assert [server.server_port for server in servers] == [8088, 8089, 8090, 8091]
    assert servers[3].devices == (TableDevice("3", "10.1.0.3", "0"),)


@pytest.mark.parametrize(
    ("prefill", "decode", "first", "second"),
    [
        ("4,5", "5,6", "prefill-0", "decode-0"),
        ("4 4", "6", "prefill-0", "prefill-1"),
        ("4 05", "5", "prefill-1", "decode-0"),
    ],
)
def test_a_device_used_twice_is_refused(prefill: str, decode: str, first: str, second: str) -> None:
    with pytest.raises(RanktableError) as caught:
        check_request(_request(prefill, decode))

    message = str(caught.value)
    assert message.startswith("A device_id can be used only once in prefill server and decode server. Device ")
    assert message.partition(";")[0].endswith(f" is in {first} and in {second}")


def test_a_device_used_twice_in_one_instance_is_refused() -> None:
    with pytest.raises(RanktableError, match=r" Device 5 is twice in decode-1$"):
        check_request(_request("4", "6 5,5"))


@pytest.mark.parametrize(("prefill", "decode"), [("1,23", "12,3"), ("1,0", "10"), ("1,23 12,3", "4")])
def test_two_instances_with_one_file_name_are_refused(prefill: str, decode: str) -> None:
    with pytest.raises(RanktableError, match=r"^local_ranktable_10\.0\.0\.18_\d+\.json would be the file of both"):
        check_request(_request(prefill, decode))


def test_nothing_to_generate_is_refused() -> None:
    with pytest.raises(RanktableError, match="nothing to generate: set --prefill-server-list, --decode-server-list or"):
        check_request(GenRequest((), (), with_scheduler=False, ip=IP))


@pytest.mark.parametrize("ip", ["10.**.**.18", "../x", "0.0.0.0", ""])
def test_a_wrong_ip_is_named(ip: str) -> None:
    with pytest.raises(RanktableError) as caught:
        check_request(_request("0", "1", ip=ip))

    assert str(caught.value).startswith(f"--ip is {ip!r}; that is ")


def test_unequal_instances_are_a_note() -> None:
    assert tensor_parallel_note([2, 2]) is None
    assert tensor_parallel_note([2, 1, 1]) == "the instances differ in tensor-parallel-size, prefill first: 2,1,1"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("8088", "--ports has 1 port, but the instances need 2: 8088"),
        ("8088,8089,8090", "--ports has 3 ports, but the instances need 2: 8088,8089,8090"),
        ("8088,8088", "--ports has 8088 twice: 8088,8088; instances of one host need different ports"),
        ("8088,0", "--ports is '8088,0'; write ports from 1 to 65535 separated by commas, like 8088,8089"),
        ("8088,65536", "--ports is '8088,65536'; write ports from 1 to 65535 separated by commas, like 8088,8089"),
        ("", "--ports is ''; write ports from 1 to 65535 separated by commas, like 8088,8089"),
    ],
)
def test_wrong_ports_name_the_flag_and_the_value(value: str, message: str) -> None:
    with pytest.raises(RanktableError) as caught:
        parse_ports(value, 2)

    assert str(caught.value) == message


def _shared_request(prefill: str, decode: str, ports: tuple[int, ...] = ()) -> GenRequest:
    return replace(_request(prefill, decode, ports=ports), share_devices=True)


def test_instances_sharing_all_devices_differ_by_port() -> None:
    request = _shared_request("0 1", "0", (8088, 8089, 8090))
    check_request(request)

    generated = build(request, dict.fromkeys("01", IP))

    assert [local.file_name for local in generated.instances] == [
        "local_ranktable_10.0.0.18_0_8088.json",
        "local_ranktable_10.0.0.18_1.json",
        "local_ranktable_10.0.0.18_0_8090.json",
    ]
    assert len({local.table for local in generated.instances}) == 3


def test_instances_that_share_some_devices_need_no_ports() -> None:
    request = _shared_request("0,1", "1,2")
    check_request(request)

    generated = build(request, dict.fromkeys("012", IP))

    assert [local.file_name for local in generated.instances] == [
        "local_ranktable_10.0.0.18_01.json",
        "local_ranktable_10.0.0.18_12.json",
    ]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (_shared_request("0", "0"), "instances with the same devices are distinguished by their ports: set --ports"),
        (_shared_request("0,0", "1"), "Device 0 is twice in prefill-0"),
        (_shared_request("1,0", "10", (1, 2)), "group the devices differently"),
        (_request("0", "0"), "if it is a GPU, ranktable gen --share-devices assigns it to both"),
    ],
)
def test_errors_that_sharing_does_not_excuse_are_refused(request_: GenRequest, words: str) -> None:
    with pytest.raises(RanktableError) as caught:
        check_request(request_)

    assert words in str(caught.value)
