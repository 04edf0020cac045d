"""How a host's cores are divided among its instances."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktable_tools.core_share import CoreShare, core_share
from ranktable_tools.tables import GlobalTable, TableDevice, TableServer

HERE = frozenset({"localhost", "127.0.0.1", "::1", "10.0.0.1"})


def _server(*ids: str, ip: str = "10.0.0.1") -> TableServer:
    return TableServer(ip, ip, tuple(TableDevice(device_id, ip, str(rank)) for rank, device_id in enumerate(ids)))


def _table(prefill: list[TableServer], decode: list[TableServer]) -> GlobalTable:
    return GlobalTable(TableServer("10.0.0.1", "10.0.0.1"), tuple(prefill), tuple(decode))


def test_one_prefill_and_one_decode_get_half_of_the_cores_each() -> None:
    prefill, decode = _server("0"), _server("1")
    table = _table([prefill], [decode])

    assert core_share(table, prefill, HERE, range(16)) == CoreShare(tuple(range(8)), shared=False, of_host=0.5)
    assert core_share(table, decode, HERE, range(16)) == CoreShare(tuple(range(8, 16)), shared=False, of_host=0.5)


def test_two_ids_on_two_cores_are_pinned_to_one_each() -> None:
    prefill, decode = _server("4"), _server("6")
    table = _table([prefill], [decode])

    assert [core_share(table, server, HERE, (3, 5)).cores for server in (prefill, decode)] == [(3,), (5,)]


def test_four_ids_on_two_cores_share() -> None:
    prefill, decode = _server("4", "5"), _server("6", "7")
    table = _table([prefill], [decode])

    assert core_share(table, prefill, HERE, (0, 1)) == CoreShare((0,), shared=True, of_host=0.5)
    assert core_share(table, decode, HERE, (0, 1)) == CoreShare((1,), shared=True, of_host=0.5)


def test_an_instance_with_more_devices_gets_the_sum() -> None:
    prefill, decode = _server("0", "1", "2"), _server("3")
    table = _table([prefill], [decode])

    assert core_share(table, prefill, HERE, range(8)).cores == tuple(range(6))
    assert core_share(table, decode, HERE, range(8)).cores == (6, 7)


def test_other_hosts_take_no_cores() -> None:
    prefill, decode = _server("0"), _server("0", ip="10.0.0.2")

    assert core_share(_table([prefill], [decode]), prefill, HERE, range(4)).cores == (0, 1, 2, 3)


@pytest.mark.parametrize("other", ["localhost", "127.0.0.1", "::1"])
def test_other_names_of_this_host_count(other: str) -> None:
    prefill, decode = _server("0"), _server("1", ip=other)

    assert core_share(_table([prefill], [decode]), prefill, HERE, range(4)).cores == (0, 1)


def test_no_cores_and_an_unknown_host_are_refused() -> None:
    table = _table([_server("0")], [_server("1")])

    with pytest.raises(ValueError, match="cannot assign 0 cores"):
        core_share(table, _server("0"), HERE, ())
    with pytest.raises(ValueError, match="cannot assign 4 cores"):
        core_share(table, _server("9"), HERE, range(4))


@given(num_ids=st.integers(2, 12), num_cores=st.integers(1, 40))
def test_cores_are_divided_evenly_and_none_is_left_over(num_ids: int, num_cores: int) -> None:
    servers = [_server(str(number)) for number in range(num_ids)]
    table = _table(servers[:1], servers[1:])

    shares = [core_share(table, server, HERE, range(num_cores)) for server in servers]

    sizes = [len(share.cores) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert {core for share in shares for core in share.cores} == set(range(num_cores))
    assert all(share.shared == (num_ids > num_cores) for share in shares)
    if num_ids <= num_cores:
        assert sum(sizes) == num_cores
