"""KV links listen on and start from --kv-ip, else the table's address."""

import socket

import pytest

from flags.options import EngineOptions
from instance.config import InstanceConfig
from instance.kv_address import kv_host, kv_source
from kvtransfer.tcp import connect, listen
from kvtransfer.transport_interface import Timeouts
from kvtransfer.transport_table import make_transports
from tests.kvtransfer.rig import TENSORS, Pool
from wire.kv_layout import PoolLayout
from wire.types import KvEndpoint, Role

OWN = ("10.0.0.18", "10.0.1.18")


def _config(server_ip: str = "10.0.0.18", **flags: str) -> InstanceConfig:
    return InstanceConfig(EngineOptions(model="m", **flags), Role.DECODE, server_ip)  # type: ignore[arg-type]


def test_listeners_use_kv_ip_or_the_tables_address() -> None:
    assert kv_host(_config(host="0.0.0.0")) == "10.0.0.18"
    assert kv_host(_config(host="10.0.0.7")) == "10.0.0.7"
    assert kv_host(_config(host="0.0.0.0", kv_ip="10.0.1.18")) == "10.0.1.18"


def test_outgoing_links_use_the_tables_address_if_it_is_local() -> None:
    assert kv_source(_config(), lambda: OWN) == "10.0.0.18"
    assert kv_source(_config(kv_ip="10.0.1.18"), lambda: OWN) == "10.0.1.18"
    assert kv_source(_config(), lambda: ()) is None
    assert kv_source(_config("127.0.0.1"), lambda: ("127.0.0.1",)) is None


@pytest.mark.parametrize("name", ["tcp", "process_group"])
def test_a_sender_dials_from_its_source(name: str) -> None:
    (transport,) = make_transports([name], Pool(PoolLayout(TENSORS, num_blocks=4, block_size=4)), source="127.0.0.2")
    listener, address = listen("127.0.0.1", None)
    with listener:
        listener.settimeout(5.0)
        stream = transport.connect(KvEndpoint(name, address), Timeouts(5.0, 5.0))
        accepted, peer = listener.accept()
        with accepted:
            stream.close()

    assert peer[0] == "127.0.0.2"


@pytest.mark.parametrize(("source", "seen"), [("127.0.0.2", "127.0.0.2"), (None, "127.0.0.1"), ("::1", "127.0.0.1")])
def test_a_peer_sees_the_source_of_its_own_address_family(source: str | None, seen: str) -> None:
    listener, address = listen("127.0.0.1", None)
    with listener:
        listener.settimeout(5.0)
        stream = connect(address, Timeouts(5.0, 5.0), source)
        accepted, peer = listener.accept()
        with accepted:
            stream.close()

    assert isinstance(accepted, socket.socket)
    assert peer[0] == seen
