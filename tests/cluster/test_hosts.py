"""The tests' network of hosts: which host reaches which, and that nothing of it outlives the test."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Network, living, obstacle

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(obstacle()), reason=obstacle())]

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("one", "other", "third")
DEADLINE_S = 300.0
HOLD = """
import time
from tests.cluster.hosts import Network
with Network(["one", "other"]) as network:
    print(*network.namespaces, flush=True)
    time.sleep(60)
"""


def _reaches(network: Network, source: str, target: str) -> bool:
    """Whether a connection from one host reaches a socket that listens on the other."""
    with network.hosts[target].entered():
        listener = socket.create_server((network.address_by_name[target], 0))
    with listener, network.hosts[source].entered(), contextlib.suppress(OSError):
        socket.create_connection(listener.getsockname(), timeout=1.0).close()
        return True
    return False


def _wait_gone(namespaces: tuple[int, ...]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while left := living(namespaces):
        assert time.monotonic() < deadline, f"still lived in: {left}"
        time.sleep(0.02)


def test_two_separated_hosts_reach_the_third_and_later_each_other() -> None:
    with Network(NAMES) as network:
        whole = _reaches(network, "one", "other")
        network.part("one", "other")
        parted = [_reaches(network, *pair) for pair in (("one", "other"), ("other", "one"), ("one", "third"))]
        network.join("one", "other")
        joined = _reaches(network, "other", "one")

    assert (whole, parted, joined) == (True, [False, False, True], True)


def test_an_unplugged_host_is_reached_by_none_until_it_is_plugged_in() -> None:
    with Network(NAMES) as network:
        network.unplug("one")
        alone = [_reaches(network, *pair) for pair in (("other", "one"), ("one", "third"), ("other", "third"))]
        network.plug_in("one")
        again = _reaches(network, "other", "one")

    assert (alone, again) == ([False, False, True], True)


def _own_namespace() -> int:
    return Path("/proc/thread-self/ns/net").stat().st_ino


def _fail_inside(network: Network, seen: list[int]) -> None:
    with network, network.hosts["one"].entered():
        seen += (_own_namespace(), *network.namespaces)
        seen.append(len(set(os.listdir("/sys/class/net"))))
        raise ValueError("a test fails")


def test_a_failure_leaves_no_namespace_link_or_thread() -> None:
    home, links = _own_namespace(), os.listdir("/sys/class/net")
    seen: list[int] = []

    with pytest.raises(ValueError, match="a test fails"):
        _fail_inside(Network(NAMES), seen)

    inside, *namespaces, links_during = seen
    assert inside in namespaces
    assert len({home, *namespaces}) == 5
    assert _own_namespace() == home
    assert links_during == len(links) == len(os.listdir("/sys/class/net"))
    _wait_gone(tuple(namespaces))


def test_no_namespace_is_left_when_the_test_itself_is_killed() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=environ) as holder:
        assert holder.stdout is not None
        namespaces = tuple(map(int, holder.stdout.readline().split()))
        before = living(namespaces)
        holder.send_signal(signal.SIGKILL)

    assert set(before) == set(namespaces)
    _wait_gone(namespaces)
