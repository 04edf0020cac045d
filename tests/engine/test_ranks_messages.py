"""What crosses between ranks: steps as integers, messages with deadlines and descriptors, marks in shared memory."""

import os
import socket
import struct
import threading
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ranks.marks import Marks, make_marks
from engine.ranks.message_kinds import RankMessageKind
from engine.ranks.packing import pack_copies, pack_shape, pack_step, unpack_copies, unpack_shape, unpack_step
from engine.ranks.setup import PoolSetup, RankLoaded, RankSetup
from engine.step import BatchSequence, EmbeddedRows, StepBatch
from processes.frames import frame
from processes.rank_channel import Channel, ChannelClosed
from processes.rank_payloads import from_json, to_json
from wire.kv_layout import KvTensor, Rank

_SETUP = RankSetup("/models/x", "float32", 1, 2, 16, "auto", None, (2, 3), 2, 10.0)
_TENSORS = (KvTensor(0, "k", 3, 64, "float32"), KvTensor(0, "v", 3, 64, "float32"))

_INTS = st.integers(0, 2**31 - 1)
_EMBEDDED = st.builds(EmbeddedRows, _INTS, _INTS, st.binary(max_size=16).map(lambda values: memoryview(values * 4)))
_SPANS = st.lists(st.tuples(_INTS, _INTS), max_size=2).map(tuple)
_PARTS = st.builds(BatchSequence, _INTS, st.integers(0, 20), st.lists(_INTS, max_size=8).map(tuple), _INTS, _SPANS)


@pytest.fixture
def ends() -> Iterator[tuple[Channel[RankMessageKind], Channel[RankMessageKind]]]:
    left, right = socket.socketpair()
    with Channel(left, RankMessageKind) as one, Channel(right, RankMessageKind) as other:
        yield one, other


@given(
    st.lists(_PARTS, max_size=8).map(tuple), st.lists(_INTS, max_size=8), st.booleans(),
    st.lists(_EMBEDDED, max_size=3).map(tuple), st.booleans(),
)  # fmt: skip
def test_a_step_comes_out_as_it_went_in(
    parts: tuple[BatchSequence, ...],
    rows: list[int],
    is_replayed: bool,
    embedded: tuple[EmbeddedRows, ...],
    has_positions: bool,
) -> None:
    token_ids = tuple(range(sum(part.count for part in parts)))

    carried = tuple((row, 0) for row in rows)

    positions = array("i", range(3 * len(token_ids))) if has_positions else None
    batch = StepBatch(token_ids, parts, (), carried=carried, embedded=embedded, positions=positions)

    payload = pack_step(batch, is_replayed=is_replayed)

    assert unpack_step(payload) == (batch, is_replayed)
    values = len(positions or ()) + 3 * len(embedded) + sum(len(one.values) // 4 for one in embedded)
    assert len(payload) == 4 * (
        6 + len(rows) + len(token_ids) + sum(5 + len(part.block_ids) + 2 * len(part.spans) for part in parts) + values
    )


def test_copies_come_out_as_pairs() -> None:
    assert unpack_copies(pack_copies([1, 2, 3], [7, 8, 9])) == ([1, 2, 3], [7, 8, 9])
    with pytest.raises(ValueError, match="1 blocks cannot be copied to 2"):
        pack_copies([1], [2, 3])
    with pytest.raises(ValueError, match="3 integers are not pairs"):
        unpack_copies(bytes(12))


def test_a_graphs_shape_comes_out_as_it_went_in() -> None:
    assert unpack_shape(pack_shape((8, 4096))) == (8, 4096)
    with pytest.raises(ValueError, match="not enough values"):
        unpack_shape(bytes(4))


@pytest.mark.parametrize(
    "values",
    [
        (), (1,), (1, 0), (1, 0, 0), (1, 0, 0, 0), (1, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0), (0, 1, 0, 0, 0, 0),
        (0, 0, 1, 0, 0, 0), (-1, 0, 0, 0, 0, 0), (2, -1, 0, 0, 0, 0), (0, 1, -1, 0, 0, 0, 5, 1, 0, 9, 0),
        (0, 1, 0, 0, 0, 0, 5, 1, 2, 9, 0, 7), (0, 1, 0, 0, 0, 0, 5, 1, -1, 9, 0), (0, 0, 0, 0, 0, 0, 1),
        (0, 0, 0, 2, 0, 0), (0, 0, 0, -1, 0, 0), (0, 0, 0, 0, 1, 0), (0, 0, 0, 0, -1, 0), (0, 0, 0, 0, 1, 0, 0, 1, 1),
        (0, 0, 0, 0, 1, 0, 0, 1, 1, 7, 7), (0, 0, 0, 0, 1, 0, 0, 1, -1), (0, 0, 0, 0, 0, 2), (0, 0, 0, 0, 0, -1),
        (1, 0, 0, 0, 0, 1, 5, 0, 0), (1, 0, 0, 0, 0, 1, 5, 0, 0, 0, 0), (0, 1, 0, 0, 0, 0, 5, 1, 0, 9, 1),
        (0, 1, 0, 0, 0, 0, 5, 1, 0, 9, -1), (0, 1, 0, 0, 0, 0, 5, 1, 0, 9, 1, 3), (0, 2**31 - 1, 0, 0, 0, 0),
    ],
)  # fmt: skip
def test_anything_but_a_step_is_refused(values: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"integers are not a step|at least 24 bytes"):
        unpack_step(struct.pack(f"<{len(values)}i", *values))


def test_a_message_brings_its_descriptors(ends: tuple[Channel[RankMessageKind], Channel[RankMessageKind]]) -> None:
    fd = os.memfd_create("sent")
    os.write(fd, b"hello")

    ends[0].send(RankMessageKind.POOL, b"payload", timeout_s=1.0, fds=(fd,))
    message = ends[1].receive(1.0)

    assert (message.kind, message.payload) == (RankMessageKind.POOL, b"payload")
    assert os.pread(message.fds[0], 5, 0) == b"hello"
    os.close(fd)
    os.close(message.fds[0])


def test_a_large_message_arrives_whole(ends: tuple[Channel[RankMessageKind], Channel[RankMessageKind]]) -> None:
    payload = os.urandom(3 << 20)
    sender = threading.Thread(target=ends[0].send, args=(RankMessageKind.STEP, payload), kwargs={"timeout_s": 10.0})
    sender.start()

    assert ends[1].receive(10.0).payload == payload
    sender.join(300.0)


def test_waits_have_a_deadline(ends: tuple[Channel[RankMessageKind], Channel[RankMessageKind]]) -> None:
    with pytest.raises(TimeoutError, match=r"no message arrived within 0\.01 s"):
        ends[0].receive(0.01)
    with pytest.raises(TimeoutError, match=r"not accepted within 0\.01 s"):
        ends[0].send(RankMessageKind.STEP, bytes(32 << 20), timeout_s=0.01)


def test_the_other_sides_end_is_noticed(ends: tuple[Channel[RankMessageKind], Channel[RankMessageKind]]) -> None:
    ends[1].close()

    with pytest.raises(ChannelClosed):
        ends[0].receive(1.0)
    with pytest.raises(ChannelClosed):
        ends[0].send(RankMessageKind.STEP, b"x", timeout_s=1.0)


@pytest.mark.parametrize("header", [frame(b"c"), (1 << 30).to_bytes(4, "big"), frame()])
def test_anything_but_a_message_is_refused(header: bytes) -> None:
    left, right = socket.socketpair()
    with left, Channel(right, RankMessageKind) as channel:
        left.sendall(header)

        with pytest.raises(ValueError, match=r"99|but the limit is|has no kind"):
            channel.receive(1.0)


def test_setups_and_answers_cross_unchanged() -> None:
    loaded, pools = RankLoaded(_TENSORS, True, False, 100, 120, 1.5), PoolSetup(_TENSORS, 77)

    assert from_json(RankSetup, to_json(_SETUP)) == _SETUP
    assert _SETUP.rank == Rank(1, 2)
    assert from_json(RankLoaded, to_json(loaded)) == loaded
    assert from_json(PoolSetup, to_json(pools)) == pools
    with pytest.raises(ValueError, match="not a RankSetup"):
        from_json(RankSetup, b'{"path": "/models/x"}')


def test_marks_name_the_ranks_behind() -> None:
    fd = make_marks(3)
    here, there = Marks(fd, 3), Marks(fd, 3)

    assert here.slowest() == ()
    for rank in (0, 2, 0, 1, 2):
        there.advance(rank)
    assert here.slowest() == (1,)
    os.close(fd)
