"""What is specific to mooncake: offsets in a ring that are checked, room that is released, a reader that stalls."""

from dataclasses import replace

import pytest

from kvtransfer.digest import StopFlag
from kvtransfer.link_messages import Open, Taken
from kvtransfer.staging import Staging
from tests.kvtransfer.every_transport import EVERY_TRANSPORT
from tests.kvtransfer.faulty import hand_over
from tests.kvtransfer.rig import RawSender, fill, make_rig, until

BLOCKS = (1, 2, 3, 4, 5)
pytestmark = [mark for one in EVERY_TRANSPORT if one.values[0] == "mooncake" for mark in one.marks]


@pytest.mark.parametrize("places", [(), (2**31,), (16 << 20,), (0, 0)])
def test_a_frame_outside_the_ring_ends_its_ticket_unread(places: tuple[int, ...]) -> None:
    with make_rig("mooncake") as rig:
        tokens = fill(rig.p_pool, range(5), 20)
        ticket, other, raw = rig.open(20, BLOCKS), rig.open(20, (10, 11, 12, 13, 14)), RawSender(rig)
        frame, _ = raw.frame(ticket, 0, 0, tokens)
        raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))

        raw.say(replace(frame, block_ids=places))
        rig.events.wait("ended", ticket.ticket_id)
        rig.hand_over(other, range(5))
        rig.events.wait("acked", other.ticket_id)

        assert "is not within a ring of 16777216" in rig.events.ends[ticket.ticket_id][1]
        raw.stream.close()


def test_a_ring_of_frames_is_reused() -> None:
    with make_rig("mooncake", num_blocks=8_192) as rig:
        blocks = range(4_000)
        for turn in range(6):  # each moves 6 MB through the ring of 16 MiB
            tokens = fill(rig.p_pool, blocks[:8], 32, seed=turn)
            ticket = rig.open(16_000, range(4_096, 8_096))
            rig.hand_over(ticket, blocks)
            rig.events.wait("acked", ticket.ticket_id)
            assert bytes(rig.d_pool.buffer[4_096 * 4 * 64 : 4_096 * 4 * 64 + 32 * 64]) == tokens[0]


def test_room_released_out_of_order_ends_only_the_link() -> None:
    with make_rig("mooncake") as rig:
        fill(rig.p_pool, range(5), 20)
        first = rig.open(20, BLOCKS)
        rig.hand_over(first, range(5))
        rig.events.wait("acked", first.ticket_id)

        (incoming,) = rig.receiver._links.values()
        incoming._inlet.skip(Taken(first.ticket_id, first.epoch, 99))  # type: ignore[union-attr,arg-type]
        until(lambda: all(link.failures == 1 for link in rig.sender.links()))
        second = rig.open(20, (10, 11, 12, 13, 14))
        rig.hand_over(second, range(5))

        rig.events.wait("acked", second.ticket_id)


def test_it_carries_prompts_beside_tcp_only_if_it_was_measured_faster() -> None:
    both = ("mooncake", "tcp")
    with make_rig("mooncake", sender_transports=both, receiver_transports=both) as rig:
        assert hand_over(rig) == "tcp"
        until(lambda: "slower" in str(rig.sender.links()[0].passed_over))

        (link,) = rig.sender.links()
        (slower,) = set(both) - {link.transport}
        assert link.passed_over[0].startswith(f"{slower}: slower than {link.transport} (")
        assert link.passed_over[0].count(" GB/s") == 2
        assert hand_over(rig, 20) == link.transport


def test_a_read_that_stalls_is_abandoned_when_its_ticket_ends() -> None:
    with make_rig("mooncake") as rig:
        tokens = fill(rig.p_pool, range(5), 20)
        ticket, raw = rig.open(20, BLOCKS), RawSender(rig)
        frame, payload = raw.frame(ticket, 0, 0, tokens)
        raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
        (incoming,) = rig.receiver._links.values()
        until(lambda: incoming._inlet is not None)  # the receiver says READY a moment before
        inlet, reading, resume = incoming._inlet, StopFlag(), StopFlag()

        class Stalled:
            def read(self, *arguments: object) -> None:
                reading.set()
                until(resume.is_set)
                raise OSError("nothing was read")

            def unregister(self, memory: Staging) -> None:
                """Nothing to release."""

        memory = inlet._memory  # type: ignore[union-attr]
        engine, memory.engine = memory.engine, Stalled()
        raw.announce(frame, payload)
        until(reading.is_set)
        rig.receiver.abort(ticket.ticket_id, "cancelled")
        rig.events.wait("ended", ticket.ticket_id)  # though the engine still reads into its staging memory

        memory.engine = engine
        resume.set()
        raw.stream.close()
