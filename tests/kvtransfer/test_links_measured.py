"""A transport that is measured first carries tickets only once its link was faster than the one in use."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvtransfer.comparison import Comparison
from kvtransfer.link import Link
from kvtransfer.link_ops import Measured
from kvtransfer.peer import Peer
from tests.kvtransfer.faulty import BOTH, FaultyTransport, begin_half, faulty_rig, finish, hand_over
from tests.kvtransfer.rig import DEADLINE_S, Rig, fill, read, until
from wire.errors import PdserveError, Unavailable
from wire.load import LinkStatus

SHM_IS_SLOWER = "shm: slower than tcp (1.00 GB/s against 2.00 GB/s)"
TCP_IS_SLOWER = "tcp: slower than shm (1.00 GB/s against 2.00 GB/s)"
UNMEASURED = "shm: its link has not been measured yet"


class Rates:
    """Replaces `compare`: names the faster of two links, once it is released, or an error."""

    def __init__(self) -> None:
        self.faster = "shm"
        self.error: PdserveError | None = None
        self.links: list[tuple[str, str]] = []
        self.released = threading.Event()
        self.released.set()

    def compare(
        self, new: Link, used: Link | None, clock: object, done: Callable[[Comparison | PdserveError], None]
    ) -> None:
        assert used is not None
        self.links.append((new.transport, used.transport))
        assert self.released.wait(DEADLINE_S)
        fast, slow = (new, used) if new.transport == self.faster else (used, new)
        done(self.error or Comparison(fast, slow, Measured(1e-3, 2e9), 1e9))


@contextmanager
def _rig(patch: pytest.MonkeyPatch) -> Iterator[tuple[Rig, dict[str, FaultyTransport]]]:
    """A rig with shm, which must be measured first, and tcp."""
    with faulty_rig(patch, BOTH) as (rig, made):
        made["shm"].traits = replace(made["shm"].traits, measured_first=True)
        yield rig, made


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Rates:
    made = Rates()
    monkeypatch.setattr("kvtransfer.peer.compare", made.compare)
    return made


def _link(rig: Rig) -> LinkStatus:
    (link,) = rig.sender.links()
    return link


def _num_links(rig: Rig) -> int:
    (peer,) = rig.sender._peers.values()
    return len(peer.links())


def test_tickets_go_over_another_transport_until_one_is_measured(monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    with _rig(monkeypatch) as (rig, _):
        rates.released.clear()
        under_way = begin_half(rig)
        until(lambda: rates.links == [("shm", "tcp")])

        assert hand_over(rig) == "tcp"
        assert _link(rig).passed_over == (UNMEASURED,)
        rates.released.set()
        until(lambda: _link(rig).transport == "shm")

        assert hand_over(rig) == "shm"
        assert finish(rig, under_way) == "tcp"
        link = _link(rig)
        assert (link.passed_over, link.bytes_per_s, link.fallbacks) == ((TCP_IS_SLOWER,), 2e9, 0)
        until(lambda: _num_links(rig) == 1)


def test_a_slower_link_is_closed_and_not_tried_again(monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    with _rig(monkeypatch) as (rig, made):
        rates.faster = "tcp"
        assert hand_over(rig) == "tcp"
        until(lambda: _link(rig).passed_over == (SHM_IS_SLOWER,))
        until(lambda: _num_links(rig) == 1)

        rig.clock.now += 3600.0
        assert [hand_over(rig) for _ in range(3)] == ["tcp"] * 3
        assert (made["shm"].num_connects, _link(rig).bytes_per_s, _link(rig).failures) == (1, 2e9, 0)


@pytest.mark.parametrize("first_faster", BOTH)
def test_a_lost_link_ends_what_was_measured(first_faster: str, monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    with _rig(monkeypatch) as (rig, made):
        rates.faster = first_faster
        assert hand_over(rig) == "tcp"
        until(lambda: "slower" in str(_link(rig).passed_over) and _link(rig).transport == first_faster)
        until(lambda: _num_links(rig) == 1)

        rates.released.clear()
        made[first_faster].cut()
        until(lambda: _link(rig).state == "down")
        assert hand_over(rig, 20) == "tcp"
        assert "slower" not in str(_link(rig).passed_over)
        rig.clock.now += 60.0
        until(lambda: len(rates.links) == 2)
        rates.faster = "shm"
        rates.released.set()

        until(lambda: _link(rig).transport == "shm")
        assert hand_over(rig, 30) == "shm"


def test_a_link_that_was_not_measured_is_tried_again(monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    with _rig(monkeypatch) as (rig, _):
        rates.error = Unavailable("the test refuses")
        assert hand_over(rig) == "tcp"
        until(lambda: _link(rig).passed_over == ("shm: its link was not measured: the test refuses",))
        until(lambda: _num_links(rig) == 1)
        assert hand_over(rig) == "tcp"

        rates.error = None
        rig.clock.now += 1.0
        until(lambda: _link(rig).transport == "shm")


def test_it_is_used_unmeasured_where_nothing_else_works(monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    with _rig(monkeypatch) as (rig, made):
        made["tcp"].refuses = True
        tokens = fill(rig.p_pool, range(1, 6), 20, seed=3)

        assert hand_over(rig) == "shm"
        assert read(rig.d_pool, range(1, 6), 20) == tokens
        assert rates.links == []


@pytest.mark.parametrize("faster", BOTH)
def test_what_failed_at_first_is_measured_later(faster: str, monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    with _rig(monkeypatch) as (rig, made):
        rates.faster, made["tcp"].refuses = faster, True
        assert hand_over(rig) == "shm"
        under_way = begin_half(rig)

        made["tcp"].refuses = False
        rig.clock.now += 1.0
        until(lambda: rates.links == [("tcp", "shm")] and _link(rig).transport == faster)
        assert finish(rig, under_way) == "shm"
        until(lambda: _num_links(rig) == 1)

        assert hand_over(rig, 20) == faster
        assert (_link(rig).transport, _link(rig).fallbacks) == (faster, 0)
        rig.clock.now += 3600.0
        assert hand_over(rig) == faster
        assert rates.links == [("tcp", "shm")]


def test_a_lost_trial_leaves_the_link_in_use_alone(monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    with _rig(monkeypatch) as (rig, made):
        rates.released.clear()
        under_way = begin_half(rig)
        until(lambda: rates.links == [("shm", "tcp")])
        made["shm"].cut()
        rates.error = Unavailable("its link is lost")
        rates.released.set()

        assert hand_over(rig) == finish(rig, under_way) == "tcp"
        assert rig.events.count("failed") == 0


def test_a_faster_link_lost_before_it_is_used_is_tried_again(monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    compare, use, lost = rates.compare, Peer._use, threading.Event()

    def on_another_thread(*arguments: object) -> None:  # as when the last measurement ends on the link in use
        threading.Thread(target=compare, args=arguments).start()

    def use_once_lost(self: Peer, link: Link, slower: str = "") -> None:
        if link.transport == "shm" and not lost.is_set():
            made["shm"].cut()
            until(lambda: not link.thread.is_alive())
            lost.set()
        use(self, link, slower)

    monkeypatch.setattr("kvtransfer.peer.compare", on_another_thread)
    monkeypatch.setattr(Peer, "_use", use_once_lost)
    with _rig(monkeypatch) as (rig, made):
        assert hand_over(rig) == "tcp"
        assert lost.wait(DEADLINE_S)
        assert hand_over(rig, 20) == "tcp"
        rig.clock.now += 60.0

        until(lambda: _link(rig).transport == "shm")


def test_real_links_are_compared_by_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    with _rig(monkeypatch) as (rig, _):
        assert hand_over(rig) == "tcp"
        until(lambda: "slower" in str(_link(rig).passed_over))

        slower, _, reason = _link(rig).passed_over[0].partition(": ")
        (faster,) = {"shm", "tcp"} - {slower}
        assert reason.startswith(f"slower than {faster} (")
        assert reason.count(" GB/s") == 2
        assert _link(rig).transport == hand_over(rig) == faster
        assert _link(rig).bytes_per_s > 0
        assert rig.receiver.bytes_received == 40 * rig.p_pool.layout.token_bytes
