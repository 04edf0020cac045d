"""Which host an address or name refers to."""

import socket
import threading

import pytest

from ranktable_tools import addresses
from ranktable_tools.addresses import (
    HostComparer,
    canonical,
    dial_host,
    host_problem,
    own_address,
    own_hosts,
    resolve,
    same_host,
    scope_problem,
)


@pytest.fixture
def two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `npu-7` mean 10.9.0.7, `me.example` mean Debian's 127.0.1.1, and all other names unknown."""
    known = {"npu-7": "10.9.0.7", "me.example": "127.0.1.1"}

    def look_up(name: str, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if name not in known:
            raise socket.gaierror(f"unknown name {name}")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(addresses, "interface_addresses", lambda: ("127.0.0.1", "10.9.0.1"))


@pytest.mark.usefixtures("two_names")
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("localhost", "127.0.0.1"),
        ("LOCALHOST", "::1"),
        ("127.0.0.1", "[::1]"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("2001:db8:0:0::7", "2001:DB8::7"),
        ("localhost", "10.9.0.1"),
        ("npu-7", "10.9.0.7"),
        ("NPU-7.", "npu-7"),
        ("me.example", "localhost"),
        ("unknown.example", "unknown.example"),
    ],
)
def test_two_spellings_of_one_host_are_the_same(a: str, b: str) -> None:
    assert same_host(a, b)
    assert same_host(b, a)


@pytest.mark.usefixtures("two_names")
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("10.0.0.5", "10.0.0.6"),
        ("localhost", "10.0.0.6"),
        ("npu-7", "localhost"),
        ("npu-7", "10.9.0.8"),
        ("unknown.example", "10.9.0.7"),
        ("127.0.0.1", "127.0.0.2"),
    ],
)
def test_two_hosts_are_not_the_same(a: str, b: str) -> None:
    assert not same_host(a, b)


def test_the_own_host_name_is_this_machine() -> None:
    assert same_host(socket.gethostname(), "localhost")
    assert canonical(socket.gethostname()) in own_hosts()


def test_a_lookup_that_hangs_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        gate.wait(300)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        assert resolve("slow.example", timeout_s=0.01) == frozenset()
    finally:
        gate.set()


def test_the_own_address_is_that_of_the_default_route() -> None:
    assert own_address(lambda family, to: "10.1.1.1", lambda: ("10.2.2.2",)) == "10.1.1.1"


def test_without_a_route_an_interface_gives_the_own_address() -> None:
    assert own_address(lambda family, to: None, lambda: ("127.0.0.1", "169.254.1.1", "10.2.2.2")) == "10.2.2.2"


def test_with_nothing_but_loopback_the_own_address_is_127_0_0_1() -> None:
    assert own_address(lambda family, to: None, lambda: ("127.0.0.1", "::1", "fe80::1")) == "127.0.0.1"


def test_an_ipv6_only_machine_has_an_ipv6_address() -> None:
    assert own_address(lambda family, to: "fd00::7" if family == socket.AF_INET6 else None, tuple) == "fd00::7"


def test_the_own_address_is_among_the_own_hosts() -> None:
    assert canonical(own_address()) in own_hosts()


@pytest.mark.parametrize("text", ["10.0.0.18", "::1", "fe80::1%eth0", "npu-7.example.com", "localhost", "node_1"])
def test_addresses_and_names_are_hosts(text: str) -> None:
    assert host_problem(text) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("10.**.**.18", "that is a masked address: write the real one"),
        ("", "that is not an address or host name"),
        ("a/b", "that is not an address or host name"),
        ("10.0.0", "that is not an address or host name"),
        ("host\n", "that is not an address or host name"),
        ("::", "that is an address to listen on, not one to reach a host at"),
    ],
)
def test_a_text_that_is_no_host_is_reported(text: str, problem: str) -> None:
    assert host_problem(text) == problem


def test_localhost_is_dialled_over_ipv4() -> None:
    assert [dial_host(host) for host in ("localhost", "::1", "10.0.0.5")] == ["127.0.0.1", "::1", "10.0.0.5"]


def test_lookups_end_when_their_time_is_spent() -> None:
    requests: list[str] = []
    now = iter(range(0, 100, 4))

    def slow(name: str) -> frozenset[str]:
        requests.append(name)
        return frozenset({"192.0.2.1"})

    hosts = HostComparer(lookups_s=10.0, look_up=slow, clock=lambda: float(next(now)))
    first = [hosts.same("192.0.2.1", f"node-{number}") for number in range(5)]

    assert requests == ["node-0", "node-1", "node-2"]
    assert first == [True, True, True, False, False]
    assert hosts.same("node-4", "node-4")


@pytest.mark.parametrize("text", ["fe80::1%eth0", "169.254.0.1", "2001:db8::1", "::1", "node_1"])
def test_addresses_of_one_host_need_no_interface(text: str) -> None:
    assert scope_problem(text) is None


@pytest.mark.parametrize("text", ["fe80::1", "FE80::a:1", "febf::1"])
def test_a_link_local_address_needs_its_interface(text: str) -> None:
    assert scope_problem(text) == (
        "a link-local address needs an interface: write an address at which other hosts reach this one, "
        f"or {text}%INTERFACE if the interface has the same name on every host"
    )
