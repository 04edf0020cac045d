"""An instance measures the link to a peer on request, one at a time, and its load has the hand-off counters."""

import asyncio
import queue
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from instance.links import LinkMeasurer, add_links
from kvtransfer.receiver_counts import ReceiverCounts
from tests.instance.pair import DEADLINE_S, instance_config, running
from wire.errors import InstanceLost
from wire.load import LinkStatus, LoadSnapshot
from wire.messages import Event, Heartbeat, LinkMeasured, MeasureLink
from wire.types import KvEndpoint, Role

LOAD = LoadSnapshot(blocks_total=8, blocks_used=1, running=1)
STATUS = LinkStatus("decode-0", "tcp", "up", 3, 40, 0, 1, 0.001, 1e9, ("shm: refused",))
COMMAND = MeasureLink("decode-0", 7, (), 1 << 20)


class ScriptedSender:
    """A sender whose measurement waits for the test; `failure` is the error that it raises."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.resume, self.failure = threading.Event(), failure
        self.frames_resent, self.bytes_sent = 4, 40
        self.requests: list[tuple[str, int, int]] = []

    def links(self) -> tuple[LinkStatus, ...]:
        return (STATUS,)

    def measure(self, peer_id: str, epoch: int, endpoints: object, num_bytes: int, timeout_s: float) -> LinkStatus:
        self.requests.append((peer_id, epoch, num_bytes))
        assert self.resume.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        return STATUS


class ScriptedReceiver:
    """A receiver with a value in every counter."""

    counts = ReceiverCounts(
        bytes_received=90, duplicate_frames=5, dropped_frames=6, corrupt_frames=7, refused_connections=8
    )


def test_the_load_has_every_counter_of_the_hand_off() -> None:
    load = replace(LOAD)
    add_links(load, ScriptedSender(), ScriptedReceiver())  # type: ignore[arg-type]

    assert load == replace(
        LOAD, kv_bytes_sent=40, kv_bytes_received=90, kv_frames_corrupt=7, kv_frames_resent=4, kv_frames_dropped=6,
        kv_frames_duplicate=5, kv_links_refused=8, links=(STATUS,),
    )  # fmt: skip


class Asker(queue.SimpleQueue[LinkMeasured]):
    """A session that sends MeasureLink, and its answers."""

    ended = False

    def emit(self, event: Event) -> None:
        assert isinstance(event, LinkMeasured)
        self.put(event)

    def answer(self) -> LinkMeasured:
        return self.get(timeout=DEADLINE_S)


def test_link_measurements_run_one_at_a_time() -> None:
    asker, measurer, sender = Asker(), LinkMeasurer(), ScriptedSender()

    measurer.measure(sender, COMMAND, asker)  # type: ignore[arg-type]
    measurer.measure(sender, replace(COMMAND, peer_id="decode-1"), asker)  # type: ignore[arg-type]
    refused = asker.answer()
    sender.resume.set()
    measured = asker.answer()
    measurer.measure(sender, COMMAND, asker)  # type: ignore[arg-type]

    assert (refused.peer_id, refused.link) == ("decode-1", None)
    assert "one at a time" in refused.error
    assert measured == asker.answer() == LinkMeasured("decode-0", STATUS)
    assert sender.requests == [("decode-0", 7, 1 << 20)] * 2


def test_a_measurement_of_another_scheduler_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third, measurer, sender = Asker(), Asker(), Asker(), LinkMeasurer(), ScriptedSender()

    measurer.measure(sender, COMMAND, first)  # type: ignore[arg-type]
    measurer.measure(sender, replace(COMMAND, peer_id="decode-1"), second)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr("instance.links.TURN_TIMEOUT_S", 0.01)
        measurer.measure(sender, COMMAND, third)  # type: ignore[arg-type]
        assert "other schedulers' measurements took 0.01 s" in third.answer().error
    sender.resume.set()

    assert (first.answer().peer_id, second.answer().peer_id) == ("decode-0", "decode-1")
    assert {peer_id for peer_id, *_ in sender.requests} == {"decode-0", "decode-1"}
    assert first.empty()
    assert second.empty()


@pytest.mark.parametrize("failure", [InstanceLost("no KV link to decode-0"), ValueError("a defect")])
def test_a_measurement_that_fails_is_answered_with_a_reason(failure: Exception) -> None:
    asker, sender = Asker(), ScriptedSender(failure)
    sender.resume.set()

    LinkMeasurer().measure(sender, COMMAND, asker)  # type: ignore[arg-type]
    answer = asker.answer()

    assert (answer.peer_id, answer.link) == ("decode-0", None)
    assert str(failure) in answer.error


def test_a_measurement_without_a_thread_fails_and_the_next_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    asker, measurer, sender = Asker(), LinkMeasurer(), ScriptedSender()
    sender.resume.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        measurer.measure(sender, COMMAND, asker)  # type: ignore[arg-type]
    assert "no thread to measure with" in asker.answer().error

    measurer.measure(sender, COMMAND, asker)  # type: ignore[arg-type]
    assert asker.answer().link == STATUS


def test_a_prefill_instance_measures_its_link_and_keeps_the_result(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            running(instance_config(tmp_path, Role.PREFILL, port=4)) as (_, prefill),
            running(instance_config(tmp_path, Role.DECODE, port=6)) as (decode, _),
        ):
            target = decode._host.describe()
            await prefill.session.send(MeasureLink(target.instance_id, target.epoch, target.endpoints, 1 << 20))
            answer = await prefill.next(LinkMeasured)
            assert isinstance(answer, LinkMeasured)
            assert answer.error == ""
            assert answer.link is not None
            assert (answer.link.peer_id, answer.link.transport, answer.link.state) == (target.instance_id, "shm", "up")
            assert answer.link.round_trip_s > 0
            assert answer.link.bytes_per_s > 0

            beat = await prefill.next(Heartbeat)
            assert isinstance(beat, Heartbeat)
            assert beat.load is not None
            assert beat.load.links == (answer.link,)
            assert decode._host.load().kv_bytes_received == 0

    asyncio.run(run())


def test_a_missing_or_silent_peer_is_reported_in_a_live_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.sender._JOIN_S", 0.5)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent_server:
            async with running(instance_config(tmp_path, Role.PREFILL, port=4)) as (_, client):
                for port, timeout_s, words in (
                    (1, DEADLINE_S, "no KV link to"),
                    (silent_server.getsockname()[1], 0.2, "could not be measured within 0.2 s"),
                ):
                    monkeypatch.setattr("instance.links.MEASURE_TIMEOUT_S", timeout_s)
                    endpoint = KvEndpoint("tcp", f"127.0.0.1:{port}")
                    await client.session.send(MeasureLink(f"decode-{port}", 1, (endpoint,), 1000))
                    answer = await client.next(LinkMeasured)
                    assert isinstance(answer, LinkMeasured)
                    assert (answer.peer_id, answer.link) == (f"decode-{port}", None)
                    assert words in answer.error
                await client.next(Heartbeat)

    asyncio.run(run())
