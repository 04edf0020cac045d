"""Several commands or events in one message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.packing import PACK_BYTES, pack
from wire import cluster_pb2 as pb

_SIZES = st.lists(st.integers(1, PACK_BYTES * 3 // 2), max_size=12)


def _cancel(number: int, num_bytes: int = 0) -> pb.CommandMessage:
    return pb.CommandMessage(cancel=pb.Cancel(prompt_id=f"{number}", reason="x" * num_bytes))


@given(_SIZES)
def test_events_arrive_in_order_in_small_messages(sizes: list[int]) -> None:
    packed = pack([_cancel(number, size) for number, size in enumerate(sizes)])

    parsed = [pb.CommandMessage.FromString(message.SerializeToString()) for message in packed]
    reported = [one.cancel for message in parsed for one in (message, *message.more)]
    assert [(cancel.prompt_id, len(cancel.reason)) for cancel in reported] == [(f"{n}", s) for n, s in enumerate(sizes)]
    for message in parsed:
        assert not message.more or sum(one.ByteSize() for one in message.more) <= PACK_BYTES


@pytest.mark.parametrize(("count", "messages"), [(0, 0), (1, 1), (2, 1), (500, 1)])
def test_small_events_share_one_message(count: int, messages: int) -> None:
    assert len(pack([_cancel(number) for number in range(count)])) == messages


def test_events_share_one_message_in_order() -> None:
    events = [pb.EventMessage(failed=pb.Failed(prompt_id=f"{number}")) for number in range(3)]

    (packed,) = pack(events)

    assert [one.failed.prompt_id for one in (packed, *packed.more)] == ["0", "1", "2"]
