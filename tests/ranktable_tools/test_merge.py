"""Tables of several hosts merged into one."""

import pytest

from ranktable_tools.errors import RanktableError
from ranktable_tools.merge import NamedPart, check_enough, merge
from ranktable_tools.tables import TableDevice, TablePart, TableServer


def _server(ip: str, device: str, port: int | None = None) -> TableServer:
    return TableServer(ip, ip, (TableDevice(device, ip, "0"),), port)


A = TableServer("10.0.0.1", "10.0.0.1")
PREFILL = [_server("10.0.0.1", "0"), _server("10.0.0.2", "0")]
DECODE = [_server("10.0.0.1", "1"), _server("10.0.0.3", "0")]


def test_servers_are_concatenated_in_argument_order() -> None:
    first = NamedPart("b.json", TablePart(None, (PREFILL[1],), ()))
    second = NamedPart("a.json", TablePart(A, (PREFILL[0],), (DECODE[0],)))
    third = NamedPart("c.json", TablePart(None, (), (DECODE[1],)))

    table = merge([first, second, third])

    assert table.scheduler == A
    assert table.prefill == (PREFILL[1], PREFILL[0])
    assert table.decode == tuple(DECODE)


@pytest.mark.parametrize("paths", [[], ["a.json"]])
def test_fewer_than_two_tables_are_refused_with_the_guides_message(paths: list[str]) -> None:
    with pytest.raises(RanktableError, match=r"^Ensure that there are two global ranktable for merge mode\. Given: "):
        check_enough(paths)


def test_two_schedulers_name_both_files_and_the_fix() -> None:
    parts = [NamedPart("a.json", TablePart(A, (PREFILL[0],), ())), NamedPart("b.json", TablePart(A, (), (DECODE[1],)))]

    with pytest.raises(RanktableError) as caught:
        merge(parts)

    assert str(caught.value) == (
        "All global ranktable can contain only one group_id 0 field. a.json and b.json have one each; keep the "
        "scheduler in one of them and generate the other again with --no-api-server "
        "(pd_ranktable_tools: without --api-server)"
    )


def test_no_scheduler_is_refused_with_the_fix() -> None:
    parts = [
        NamedPart("a.json", TablePart(None, (PREFILL[0],), ())),
        NamedPart("b.json", TablePart(None, (), (DECODE[1],))),
    ]

    with pytest.raises(RanktableError) as caught:
        merge(parts)

    assert str(caught.value) == (
        "no table has group_id 0, the scheduler: a.json, b.json; generate one of them again with --api-server"
    )


def test_a_role_without_instances_is_refused() -> None:
    parts = [
        NamedPart("a.json", TablePart(A, (PREFILL[0],), ())),
        NamedPart("b.json", TablePart(None, (PREFILL[1],), ())),
    ]

    with pytest.raises(RanktableError, match="no table has a decode instance; generate one with --decode-server-list"):
        merge(parts)


def test_a_device_in_two_files_names_both() -> None:
    parts = [
        NamedPart("a.json", TablePart(A, (PREFILL[0],), (DECODE[0],))),
        NamedPart("b.json", TablePart(None, (), (_server("10.0.0.1", "0"),))),
    ]

    with pytest.raises(RanktableError) as caught:
        merge(parts)

    assert str(caught.value) == (
        'b.json: decode-0.device[0].device_id is "0" on 10.0.0.1, as a.json: prefill-0.device[0]'
        ".device_id is; A device_id can be used only once in prefill server and decode server."
    )


def test_one_port_in_two_files_of_one_host_names_both() -> None:
    parts = [
        NamedPart("a.json", TablePart(A, (_server("10.0.0.1", "0", 8088),), ())),
        NamedPart("b.json", TablePart(None, (), (_server("10.0.0.1", "1", 8088),))),
    ]

    with pytest.raises(RanktableError, match=r"b\.json: decode-0\.server_port names port 8088 on 10\.0\.0\.1, as a"):
        merge(parts)
