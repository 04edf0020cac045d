"""Ports are found and refused by binding them."""

import inspect
import socket
from collections import deque
from pathlib import Path

import pytest

from pdserve import ports as module
from pdserve.ports import free_ports, require_free
from wire.errors import ConfigError


def test_a_port_in_use_is_refused_by_its_number() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        with pytest.raises(ConfigError, match=rf"--port {port} on 127\.0\.0\.1: in use by another process"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)


def test_a_port_shared_by_reuseport_counts_as_in_use() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        with pytest.raises(ConfigError, match="in use"):
            require_free("127.0.0.1", listener.getsockname()[1])


def test_an_address_of_another_host_is_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError, match=r"--port 1 on 192\.0\.2\.1|--port 12345 on 192\.0\.2\.1"):
        require_free("192.0.2.1", 12345)


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="70000"):
        require_free("127.0.0.1", 70000)


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(8)

    assert len(set(ports)) == 8
    for port in ports:
        require_free("127.0.0.1", port)


def test_ports_given_before_are_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    few = free_ports(8)
    monkeypatch.setattr(module, "_ports_not_ephemeral", lambda: few)
    monkeypatch.setattr(module, "_given", deque(few[:6]))

    assert set(free_ports(2)) == set(few[6:])


def test_free_ports_are_outside_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch) -> None:
    own = inspect.unwrap(module._ports_not_ephemeral)  # not this test worker's share
    monkeypatch.setattr(module, "_ports_not_ephemeral", own)
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())

    ports = free_ports(20)

    assert len(set(ports)) == 20
    assert not [port for port in ports if low <= port <= high]


def test_ports_past_the_end_of_their_range_are_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ports_not_ephemeral", lambda: range(65_436, 65_536))
    monkeypatch.setattr(module, "_given", deque[int](maxlen=2_000))

    ports = [port for _ in range(1_000) for port in free_ports(1)]

    assert len(set(ports)) == len(ports)
    assert set(ports) & set(range(65_436, 65_536))
