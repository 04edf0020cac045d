"""A transport that breaks: the next one takes over at once, other peers are unaffected, and the better one recovers."""

import socket
import threading
from dataclasses import replace

import pytest

from tests.kvtransfer import test_contract as contract
from tests.kvtransfer.faulty import BLOCKS, BOTH, begin_half, faulty_rig, finish, hand_over
from tests.kvtransfer.rig import DEADLINE_S, Rig, fill, make_rig, read, until
from wire.errors import InstanceLost
from wire.load import LinkStatus


def _link(rig: Rig) -> LinkStatus:
    (link,) = rig.sender.links()
    return link


def _num_connections(rig: Rig, family: socket.AddressFamily) -> int:
    return sum(link._stream.socket.family == family for link in list(rig.receiver._links.values()))


def _is_trying(rig: Rig) -> bool:
    (peer,) = rig.sender._peers.values()
    with peer._lock:
        return peer._trial is not None


def _cut_shm(rig: Rig) -> None:
    for link in list(rig.receiver._links.values()):
        if link._stream.socket.family == socket.AF_UNIX:
            link.shutdown()


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    "claim",
    [
        contract.test_begin_put_and_commit_are_idempotent,
        contract.test_an_abort_by_the_receiver_reaches_the_sender,
        contract.test_a_senders_abort_ends_the_receivers_half_silently,
        contract.test_only_tokens_from_the_requested_first_one_are_sent,
        contract.test_two_tickets_at_once_do_not_mix,
    ],
)
def test_the_faulty_transport_works_while_unfaulted(name: str, claim: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch, (name,)) as (rig, _):
        claim(rig)  # type: ignore[operator]


def test_a_cut_shm_link_loses_its_tickets_and_shm_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with make_rig("shm", sender_transports=BOTH, receiver_transports=BOTH) as rig:
        assert hand_over(rig) == "shm"
        unlucky = begin_half(rig, 20)

        _cut_shm(rig)
        rig.events.wait("failed", unlucky.ticket_id)
        tokens = fill(rig.p_pool, range(1, 6), 20, seed=3)
        assert hand_over(rig) == "tcp"

        assert isinstance(rig.events.failures[unlucky.ticket_id], InstanceLost)
        assert read(rig.d_pool, range(1, 6), 20) == tokens
        link = _link(rig)
        assert (link.transport, link.state, link.failures, link.fallbacks) == ("tcp", "up", 1, 1)
        assert len(link.passed_over) == 1
        assert link.passed_over[0].startswith("shm: the KV link to decode-0 is lost")

        rig.clock.now += 1.0
        until(lambda: _link(rig).transport == "shm")
        assert hand_over(rig) == "shm"
        until(lambda: _num_connections(rig, socket.AF_INET) == 0)
        assert (_link(rig).passed_over, _link(rig).fallbacks) == ((), 1)
        assert rig.events.count("failed") == 1
    events = [record.getMessage().split()[0] for record in caplog.records]
    assert [name for name in events if name in ("kv_link_up", "kv_fallback", "kv_link_back")] == [
        "kv_link_up", "kv_link_up", "kv_fallback", "kv_link_up", "kv_link_back",
    ]  # fmt: skip


def test_a_closed_shm_listener_is_retried_with_growing_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with faulty_rig(monkeypatch) as (rig, made):
        assert hand_over(rig) == "shm"
        rig.receiver._listeners[True][0].shutdown(socket.SHUT_RDWR)
        _cut_shm(rig)
        until(lambda: _link(rig).state == "down")
        assert hand_over(rig) == "tcp"
        tried = made["shm"].num_connects
        for rest in (1.0, 2.0, 4.0):
            rig.clock.now += rest - 0.01
            assert hand_over(rig) == "tcp"
            assert made["shm"].num_connects == tried
            rig.clock.now += 0.01
            tried += 1
            until(lambda wanted=tried: made["shm"].num_connects == wanted)  # type: ignore[misc]
            until(lambda: not _is_trying(rig))

        assert hand_over(rig) == "tcp"
        assert "shm at " in _link(rig).passed_over[0]
        assert rig.events.count("failed") == 0
        assert _link(rig).fallbacks == 1


def test_new_tickets_move_to_the_better_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with faulty_rig(monkeypatch) as (rig, made):
        made["shm"].refuses = True
        under_way = begin_half(rig)
        made["shm"].refuses = False
        rig.clock.now += 1.0
        until(lambda: _link(rig).transport == "shm")

        assert hand_over(rig, 30) == "shm"
        assert _num_connections(rig, socket.AF_INET) == 1
        assert finish(rig, under_way) == "tcp"
        until(lambda: _num_connections(rig, socket.AF_INET) == 0)

        assert rig.events.count("failed") == 0
        assert rig.sender.bytes_sent == 40 * rig.p_pool.layout.token_bytes


@pytest.mark.parametrize("names", [BOTH, ("shm",)])
def test_no_ticket_waits_for_a_slow_set_up_if_others_are_quick(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_rig(monkeypatch, names) as (rig, made):
        made["shm"].traits = replace(made["shm"].traits, is_slow=lambda _: True)
        if names == BOTH:
            made["shm"].free.clear()
            assert hand_over(rig) == "tcp"
            assert made["shm"].waiting.wait(DEADLINE_S)
            assert _link(rig).passed_over == ("shm: its link is being set up",)
            made["shm"].free.set()
            until(lambda: _link(rig).transport == "shm")

        assert hand_over(rig) == "shm"
        assert (_link(rig).passed_over, _link(rig).fallbacks) == ((), 0)


def test_a_slow_set_up_replaces_a_worse_one_if_the_best_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch, ("shm", "process_group", "tcp")) as (rig, made):
        made["process_group"].traits = replace(made["process_group"].traits, is_slow=lambda _: True)
        made["shm"].refuses = True

        assert hand_over(rig) == "tcp"
        until(lambda: _link(rig).transport == "process_group")
        assert hand_over(rig) == "process_group"


def test_a_slow_set_up_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch) as (rig, made):
        made["shm"].traits = replace(made["shm"].traits, is_slow=lambda _: True)
        made["shm"].refuses = True
        assert hand_over(rig) == "tcp"
        until(lambda: "the test refuses shm" in str(_link(rig).passed_over))
        assert hand_over(rig) == "tcp"

        made["shm"].refuses = False
        rig.clock.now += 1.0
        until(lambda: _link(rig).transport == "shm")
        assert _link(rig).fallbacks == 0


def test_a_slow_dial_of_the_better_one_is_on_no_tickets_path(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch) as (rig, made):
        made["shm"].refuses = True
        assert hand_over(rig) == "tcp"
        made["shm"].refuses = False
        made["shm"].free.clear()
        rig.clock.now += 1.0
        assert made["shm"].waiting.wait(DEADLINE_S)

        assert [hand_over(rig) for _ in range(3)] == ["tcp"] * 3
        made["shm"].free.set()
        until(lambda: _link(rig).transport == "shm")
        assert hand_over(rig) == "shm"


def test_a_ticket_waits_for_no_trial_of_a_better_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch) as (rig, made):
        made["shm"].refuses = True
        assert hand_over(rig) == "tcp"
        made["shm"].free.clear()
        rig.clock.now += 1.0
        assert made["shm"].waiting.wait(DEADLINE_S)
        (peer,) = rig.sender._peers.values()
        made["tcp"].cut()
        until(lambda: "up" not in [link.state for link in peer.links()])

        assert hand_over(rig) == "tcp"
        assert made["shm"].num_connects == 2


class Held:
    """A lock that blocks the threads of links until it is opened; all others pass."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self.reached, self.opened = lock, threading.Event(), threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread().name.startswith("kv-out"):
            self.reached.set()
            assert self.opened.wait(DEADLINE_S)
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_no_better_transport_is_tried_for_a_retired_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch) as (rig, made):
        made["shm"].refuses = True
        assert hand_over(rig) == "tcp"
        made["shm"].refuses = False
        (peer,) = rig.sender._peers.values()
        peer._lock = held = Held(peer._lock)  # type: ignore[assignment]
        assert held.reached.wait(DEADLINE_S)  # the link's thread has seen that a trial would be welcome

        rig.clock.now += 1.0
        peer.retire()
        held.opened.set()

        until(lambda: not rig.receiver._links)
        assert made["shm"].num_connects == 1


def test_a_pool_shm_cannot_map_falls_back_from_the_start() -> None:
    with make_rig("shm", sender_seals=0, sender_transports=BOTH, receiver_transports=BOTH) as rig:
        assert hand_over(rig) == "tcp"

        link = _link(rig)
        assert (link.transport, link.fallbacks, link.failures) == ("tcp", 1, 0)
        assert "has seals 0x0" in link.passed_over[0]


def test_tcp_to_another_host_is_not_a_fallback() -> None:
    with make_rig("shm", sender_transports=BOTH, receiver_transports=BOTH) as rig:
        ticket = rig.open(20, BLOCKS)
        elsewhere = tuple(replace(endpoint, host_id="another boot") for endpoint in ticket.endpoints)
        rig.hand_over(replace(ticket, endpoints=elsewhere), BLOCKS)
        rig.events.wait("acked", ticket.ticket_id)

        assert rig.events.acks[ticket.ticket_id].transport == "tcp"
        assert _link(rig).fallbacks == 0
        assert _link(rig).passed_over == ("shm: another host or network namespace",)


def test_when_no_transport_works_every_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch) as (rig, made):
        for transport in made.values():
            transport.refuses = True
        ticket = rig.open(20, range(5))
        rig.sender.begin(ticket)
        rig.events.wait("failed", ticket.ticket_id)
        error = rig.events.failures[ticket.ticket_id]
        assert isinstance(error, InstanceLost)
        assert "the test refuses shm" in str(error)
        assert "the test refuses tcp" in str(error)

        for transport in made.values():
            transport.refuses = False
        assert hand_over(rig) == "shm"


def test_a_failure_of_every_transport_does_not_mark_the_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch) as (rig, made):
        made["shm"].refuses = True
        assert hand_over(rig) == "tcp"
        rig.clock.now += 1.0
        until(lambda: made["shm"].num_connects == 2)  # it rests for two seconds now, longer than tcp will
        until(lambda: not _is_trying(rig))
        made["tcp"].cut()
        until(lambda: _link(rig).state == "down")
        made["tcp"].refuses = True
        ticket = rig.open(20, BLOCKS)
        rig.sender.begin(ticket)
        rig.events.wait("failed", ticket.ticket_id)

        made["shm"].refuses = made["tcp"].refuses = False
        assert hand_over(rig) == "shm"


def test_if_all_rest_they_are_tried_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch) as (rig, made):
        assert hand_over(rig) == "shm"
        made["shm"].cut()
        until(lambda: _link(rig).state == "down")
        made["tcp"].refuses = True

        assert hand_over(rig) == "shm"


def test_a_fault_of_the_worse_transport_affects_no_better_link(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch) as (rig, made):
        made["tcp"].refuses = True
        under_way = begin_half(rig)
        assert [hand_over(rig) for _ in range(3)] == ["shm"] * 3

        assert finish(rig, under_way) == "shm"
        assert made["tcp"].num_connects == 0
