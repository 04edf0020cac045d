"""Links over process_group: what listens, what is refused, what stalls, and that links never deadlock in a cycle."""

import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from devices.collectives import COLLECTIVES
from kvtransfer.link_codec import WireError
from kvtransfer.outbox import _BATCH_BYTES, _BATCH_PIECES
from kvtransfer.process_group import link_ends as ends_module
from kvtransfer.process_group.devices import PROCESS_DEVICES
from kvtransfer.process_group.exchange import SetupExchange, SetupKind
from kvtransfer.process_group.group import Group
from kvtransfer.process_group.group_setup import group_name
from kvtransfer.process_group.issue import IssueQueue
from kvtransfer.process_group.link_ends import MAX_PAYLOAD_BYTES, OUTLET_BYTES
from kvtransfer.stream import LinkLost
from kvtransfer.transport_interface import Timeouts
from kvtransfer.transport_table import make_transports
from tests.kvtransfer.groups import (
    NEVER,
    frame_of,
    group_threads,
    hello_of,
    limit_progress,
    link,
    linked,
    make_node,
    place_of,
    stopping,
    stream_pair,
)
from tests.kvtransfer.rig import DEADLINE_S, until
from wire.errors import ConfigError, HandoffFailed, Unavailable

ROOT = Path(__file__).parents[2]


def _listening_addresses() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="inet")
    return {tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN}  # type: ignore[misc]


def test_frames_arrive_in_order_and_complete() -> None:
    source = random.Random(3)
    payloads = [source.randbytes(size) for size in (1, 6_144, 1 << 20, MAX_PAYLOAD_BYTES, 77)]
    with linked(make_node("p"), make_node("d")) as ends:
        frames = [ends.send(payload, number) for number, payload in enumerate(payloads[:4])]
        arrived = [ends.receive(frame) for frame in frames]
        arrived.append(ends.receive(ends.send(payloads[4])))

        assert arrived == payloads


def test_a_group_listens_on_the_links_address_until_it_is_made() -> None:
    before = _listening_addresses()
    with linked(make_node("p"), make_node("d")) as ends:
        during = _listening_addresses() - before
        assert ends.receive(ends.send(b"x" * 100)) == b"x" * 100

    assert len(during) == 2
    assert {address for address, _ in during} == {"127.0.0.1"}
    until(lambda: _listening_addresses() == before)


def test_a_closed_link_leaves_no_thread() -> None:
    with linked(make_node("p"), make_node("d")) as ends:
        ends.receive(ends.send(b"payload"))
        assert len(group_threads()) == 6

    until(lambda: not group_threads())


def test_an_unwanted_frame_is_received_and_dropped() -> None:
    with linked(make_node("p"), make_node("d")) as ends:
        unwanted, wanted = ends.send(b"u" * 5_000), ends.send(b"w" * 3_000)

        ends.inlet.skip(unwanted)

        assert ends.receive(wanted) == b"w" * 3_000


def test_a_move_that_is_stopped_is_finished_by_skip() -> None:
    with linked(make_node("p"), make_node("d")) as ends:
        late, target = frame_of(b"l" * 5_000), bytearray(5_000)
        stop = type(NEVER)()
        stop.set()

        assert ends.inlet.move(late, place_of(target), stop) is None
        assert ends.send(b"l" * 5_000) == late
        ends.inlet.skip(late)

        assert target == bytes(5_000)
        assert ends.receive(ends.send(b"next")) == b"next"


def test_a_payload_past_the_limit_is_refused_on_both_sides() -> None:
    with linked(make_node("p"), make_node("d")) as ends:
        big = bytearray(MAX_PAYLOAD_BYTES + 1)
        frame = frame_of(bytes(big))

        with pytest.raises(HandoffFailed, match=f"{len(big)} bytes, but the limit is {MAX_PAYLOAD_BYTES}"):
            ends.outlet.announce(frame, place_of(big))
        with pytest.raises(HandoffFailed, match=f"{len(big)} bytes, but the limit is {MAX_PAYLOAD_BYTES}"):
            ends.inlet.move(frame, place_of(big), NEVER)
        with pytest.raises(WireError, match=f"{len(big)} bytes, but the limit is {MAX_PAYLOAD_BYTES}"):
            ends.inlet.skip(frame)


def test_a_sender_runs_ahead_by_its_window_only() -> None:
    payload, room = os.urandom(MAX_PAYLOAD_BYTES), OUTLET_BYTES // MAX_PAYLOAD_BYTES
    with linked(make_node("p"), make_node("d")) as ends, ThreadPoolExecutor(1) as sender:
        frames = [ends.send(payload, number) for number in range(room)]
        assert ends.outlet._ring.take(1) is None

        more = sender.submit(ends.send, payload, room)
        assert ends.receive(frames[0]) == payload
        assert more.result(DEADLINE_S).number == room
        for frame in [*frames[1:], more.result()]:
            assert ends.receive(frame) == payload


def test_headers_in_the_outbox_never_block_a_frame() -> None:
    assert OUTLET_BYTES >= 2 * MAX_PAYLOAD_BYTES + _BATCH_BYTES
    assert ends_module._MAX_UNDER_WAY >= 2 * _BATCH_PIECES


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_peer_that_leaves_within_a_frame_ends_the_link_at_once(side: str) -> None:
    ends = link(make_node("p"), make_node("d"), timeouts=Timeouts(5.0, 60.0))
    frame, outcome = frame_of(b"x" * 4_000), []

    def wait() -> None:
        try:
            if side == "sender":
                ends.inlet.move(frame, place_of(bytearray(4_000)), NEVER)
            else:
                ends.fill(MAX_PAYLOAD_BYTES, OUTLET_BYTES // MAX_PAYLOAD_BYTES + 1)
        except LinkLost as error:
            outcome.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    (ends.outlet if side == "sender" else ends.inlet).close()
    waiting.join(DEADLINE_S)
    ends.close()

    assert len(outcome) == 1
    until(lambda: not group_threads())


def test_a_peer_that_never_receives_ends_only_its_own_link() -> None:
    p, silent, responsive = make_node("p"), make_node("silent"), make_node("responsive")
    with linked(p, silent, 1) as stalled, linked(p, responsive, 2) as moving:
        limit_progress(stalled, 1.0)
        stalled.send(b"s" * 1_000)
        lost, moved = "", 0
        while not lost:
            assert moving.receive(moving.send(b"m" * 1_000, moved)) == b"m" * 1_000
            moved += 1
            try:
                stalled.outlet._wait_for_room(1)
            except LinkLost as error:
                lost = str(error)

        assert "no data was transferred for 1 s" in lost
        assert moved > 10  # one, had they waited for the stalled one
        assert moving.receive(moving.send(b"after")) == b"after"


def test_a_pair_is_rebuilt_with_a_new_epoch_after_its_link_broke() -> None:
    p, d = make_node("p"), make_node("d")
    with linked(p, d, 1) as first, linked(p, d, 2) as second:
        first.inlet.close()
        with pytest.raises(LinkLost):
            first.fill(MAX_PAYLOAD_BYTES, 5)

        assert second.receive(second.send(b"again")) == b"again"


def test_a_silent_peer_holds_the_device_for_the_connect_timeout() -> None:
    p, silent, other = make_node("p"), make_node("silent"), make_node("other")
    streams, hello = stream_pair(DEADLINE_S), hello_of(p, silent, 7)
    with linked(p, other) as moving, ThreadPoolExecutor(1) as makers:
        made = makers.submit(p.transport.outlet, streams[0], hello, Timeouts(0.3, DEADLINE_S))
        exchange = SetupExchange(streams[1], group_name(hello))
        exchange.receive([SetupKind.TERMS], DEADLINE_S)
        exchange.receive([SetupKind.TURN], DEADLINE_S)
        exchange.send(SetupKind.GRANTED)
        while not made.done():
            assert moving.receive(moving.send(b"meanwhile")) == b"meanwhile"

        with pytest.raises(LinkLost):
            made.result()
        assert moving.receive(moving.send(b"after")) == b"after"
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("before", ["the proof", "the last word"])
def test_a_peer_stopped_after_set_up_delays_no_other_link(before: str) -> None:
    p, silent, other = make_node("p"), make_node("silent"), make_node("other")
    with stopping(p, silent, Timeouts(5.0, DEADLINE_S), proves=before == "the last word") as made:
        with linked(p, other, 8, Timeouts(5.0, DEADLINE_S / 4)) as ends:
            assert ends.receive(ends.send(b"meanwhile")) == b"meanwhile"
        assert not made.done()

    assert isinstance(made.exception(DEADLINE_S), LinkLost)
    until(lambda: not group_threads())


class FakeGroup:
    """A group whose only operation ends when it is aborted; it records the thread that releases it."""

    def __init__(self, freed_by: list[str]) -> None:
        self._freed_by, self.aborted = freed_by, threading.Event()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SimpleNamespace:
        return SimpleNamespace(is_completed=self.aborted.is_set, wait=lambda timeout: True)

    def __del__(self) -> None:
        self._freed_by.append(threading.current_thread().name)


def test_an_aborted_group_is_released_by_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    freed_by: list[str] = []
    submitted, resume, submit = threading.Event(), threading.Event(), IssueQueue.submit

    def held_up(self: IssueQueue, task: Callable[[], object]) -> Future[object]:
        done = submit(self, task)
        if threading.current_thread().name == "closing":
            submitted.set()
            assert resume.wait(DEADLINE_S)
        return done

    monkeypatch.setattr(IssueQueue, "submit", held_up)
    fake = replace(COLLECTIVES["gloo"], polls=True, abort=lambda group, peer: group.aborted.set())
    lease = PROCESS_DEVICES.lease(make_node("p").pool)
    group = Group(
        FakeGroup(freed_by), fake, lease, name="p-d", peer=1, timeouts=Timeouts(progress_s=DEADLINE_S), keep=None,
        set_up=IssueQueue("kv-set-up-p-d"),
    )  # fmt: skip
    group.send(torch.zeros(1))
    closing = threading.Thread(target=group.close, name="closing")
    closing.start()
    assert submitted.wait(DEADLINE_S)

    group._waiter.join(DEADLINE_S)
    assert freed_by == ["kv-set-up-p-d"]
    resume.set()
    closing.join(DEADLINE_S)


def test_a_failed_task_is_not_kept_by_its_own_error() -> None:
    """Else the garbage collector would free a group, on any thread."""
    tasks = IssueQueue("kv-issue-test")
    freed_by: list[str] = []
    task = FakeGroup(freed_by)
    failed = tasks.submit(partial(task.send, []))
    del task
    gc.disable()
    try:
        assert isinstance(failed.exception(DEADLINE_S), TypeError)
        del failed
        until(lambda: bool(freed_by))
    finally:
        gc.enable()
        tasks.close()


@pytest.mark.parametrize("rounds", [10, pytest.param(300, marks=pytest.mark.long)])
def test_links_in_a_cycle_of_three_are_made_at_once(rounds: int) -> None:
    nodes = [make_node(name) for name in "abc"]
    pairs = [(one, two) for one in nodes for two in nodes if one is not two]
    with ThreadPoolExecutor(len(pairs)) as makers:
        for round_number in range(rounds):
            made = [makers.submit(link, *pair, 10 * round_number + i) for i, pair in enumerate(pairs)]
            links = [one.result(DEADLINE_S) for one in made]
            frames = [ends.send(bytes([i]) * 100) for i, ends in enumerate(links)]
            for i, (ends, frame) in enumerate(zip(links, frames, strict=True)):
                assert ends.receive(frame) == bytes([i]) * 100
            for closed in [makers.submit(ends.close) for ends in links]:
                closed.result(DEADLINE_S)

    until(lambda: not group_threads())


def test_an_instance_makes_no_group_with_itself() -> None:
    same = make_node("same")
    with pytest.raises(Unavailable, match="same cannot make a group with itself"):
        link(same, same)


def test_another_kind_of_group_is_refused_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["2.13", "2.12"])
    monkeypatch.setattr("kvtransfer.process_group.group_setup.torch_version", lambda: next(versions))

    with pytest.raises(Unavailable, match=r"gloo of torch 2\.1\d here, but with gloo of torch 2\.1\d there"):
        link(make_node("p"), make_node("d"))
    until(lambda: not group_threads())


def test_a_peer_missing_at_set_up_costs_the_connect_timeout() -> None:
    p, d, other = make_node("p"), make_node("d"), make_node("other")
    streams = stream_pair(DEADLINE_S)
    with pytest.raises(LinkLost):
        p.transport.outlet(streams[0], hello_of(p, d), Timeouts(0.2, 0.5))
    for stream in streams:
        stream.close()

    with linked(p, other) as ends:
        assert ends.receive(ends.send(b"free again")) == b"free again"


def test_kvtransfer_is_imported_without_torch() -> None:
    code = "import sys, kvtransfer.sender, kvtransfer.receiver; assert 'torch' not in sys.modules"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=3 * DEADLINE_S, check=False).returncode == 0


def test_without_torch_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    pool = make_node("p").pool

    with pytest.raises(ConfigError, match=r"--kv-transport process_group: gloo: torch is not installed"):
        make_transports(("process_group",), pool)


@pytest.mark.parametrize(("device", "words"), [("npu:0", "hccl: torch_npu is not installed"), ("tpu:1", "on tpu:1")])
def test_a_device_without_its_backend_is_named(device: str, words: str) -> None:
    assert words in (make_node("p", device).transport.unusable() or "")
