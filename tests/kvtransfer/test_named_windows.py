"""Both halves of naming agree for any frames, whatever is forgotten in between; unnamed windows are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.link_codec import PREFIX, decode
from kvtransfer.link_messages import Frame, MessageType
from kvtransfer.named_windows import MAX_WINDOWS, WindowNamer, WindowNames
from wire.errors import HandoffFailed

BLOCK_SIZE = 4
TABLES = [tuple(range(first, first + 3)) for first in range(MAX_WINDOWS + 8)]


def frame(table: int, start: int = 0, end: int = 10) -> Frame:
    return Frame("ab" * 16, 1, 0, 0, 0, start, end, 0, 2, 64, 0, TABLES[table])


def encode_and_decode(namer: WindowNamer, frame: Frame) -> Frame:
    message = decode(MessageType.FRAME, namer.encode(frame)[PREFIX.size :])
    assert isinstance(message, Frame)
    return message


@given(st.lists(st.tuples(st.integers(0, len(TABLES) - 1), st.integers(0, 3), st.integers(5, 12)), max_size=300))
def test_every_frame_arrives_with_the_blocks_it_left_with(sent: list[tuple[int, int, int]]) -> None:
    namer, names = WindowNamer(), WindowNames(BLOCK_SIZE)
    for table, start, end in sent:
        where = names.window_of(encode_and_decode(namer, frame(table, start, end)))

        assert where.block_ids == TABLES[table]
        assert (where.start, where.end) == (start, end)


def test_blocks_are_named_once_until_they_are_forgotten() -> None:
    namer = WindowNamer()

    assert [len(encode_and_decode(namer, frame(0)).block_ids) for _ in range(3)] == [3, 0, 0]
    for table in range(1, MAX_WINDOWS + 1):
        encode_and_decode(namer, frame(table))
    assert encode_and_decode(namer, frame(0)).block_ids == TABLES[0]


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (Frame("ab" * 16, 1, 5, 0, 0, 0, 10, 0, 2, 64, 0, (), 2), r"frame 5 .*names window 2, which is unknown"),
        (Frame("ab" * 16, 1, 5, 0, 0, 0, 11, 0, 2, 64, 0, (), 1), r"names window 1, which has tokens \[0, 10\)"),
        (Frame("ab" * 16, 1, 5, 0, 0, 1, 10, 0, 2, 64, 0, (), 1), r"names window 1, which has tokens \[0, 10\)"),
    ],
)
def test_a_window_that_was_not_named_is_refused(again: Frame, words: str) -> None:
    names = WindowNames(BLOCK_SIZE)
    names.window_of(encode_and_decode(WindowNamer(), frame(0)))

    with pytest.raises(HandoffFailed, match=words):
        names.window_of(again)


def test_more_blocks_than_the_tokens_need_are_refused() -> None:
    names = WindowNames(BLOCK_SIZE)

    with pytest.raises(HandoffFailed, match="frame 0 names 12 blocks, but the limit is 11"):
        names.window_of(Frame("ab" * 16, 1, 0, 0, 0, 0, 10, 0, 2, 64, 0, tuple(range(12)), 1))

    assert not names._named


def test_the_kept_windows_are_bounded() -> None:
    names = WindowNames(BLOCK_SIZE)
    for number in range(10_000):
        names.window_of(Frame("ab" * 16, 1, 0, 0, 0, 0, 10, 0, 2, 64, 0, (1, 2, 3), number))

    assert len(names._named) == MAX_WINDOWS
