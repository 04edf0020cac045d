"""Which addresses the hosts of a table have."""

from dataclasses import replace

from ranktable_tools.addresses import own_hosts
from ranktable_tools.peers import peer_addresses
from ranktable_tools.tables import GlobalTable, TableDevice, TableServer


def table(*hosts: str) -> GlobalTable:
    servers = [TableServer(host, host, (TableDevice(str(number), "", "0"),)) for number, host in enumerate(hosts)]
    return GlobalTable(TableServer(hosts[0], hosts[0]), tuple(servers[:1]), tuple(servers[1:]))


def test_on_another_machine_only_the_tables_hosts_count() -> None:
    assert peer_addresses(table("192.0.2.7", "192.0.2.8")) == {"192.0.2.7", "192.0.2.8"}


def test_on_a_host_of_the_table_all_its_addresses_count() -> None:
    assert peer_addresses(table("192.0.2.7", "127.0.0.1")) == {"192.0.2.7", *own_hosts()}
    assert "127.0.0.1" in peer_addresses(table("localhost", "localhost"))


def test_the_host_of_another_engines_worker_is_no_peer() -> None:
    listed = table("192.0.2.7", "192.0.2.8")
    worker = replace(listed.decode[0], worker="vllm")

    assert peer_addresses(replace(listed, decode=(worker,))) == {"192.0.2.7"}


def test_an_unknown_name_adds_no_address() -> None:
    assert peer_addresses(table("no-such-host.invalid", "192.0.2.8")) == {"no-such-host.invalid", "192.0.2.8"}
