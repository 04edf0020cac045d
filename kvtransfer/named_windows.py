"""Numbered windows: a frame's block ids in the sender's pool are sent once per link; later frames use the number.

    FRAME window 7, blocks 3 9 4 | FRAME window 7 | FRAME window 7 | FRAME window 8, blocks 12 13 | ...

Both ends keep the last windows, in the order of their definition, and drop the same ones. For transports whose
receiver reads the sender's pool.
"""

from dataclasses import replace

from kvtransfer.link_codec import encode
from kvtransfer.link_messages import Frame
from kvtransfer.slots import BlockWindow
from wire.errors import HandoffFailed

MAX_WINDOWS = 64
_LAST_NUMBER = 2**32 - 1  # then 1 again: of the windows that both ends keep, none is so old


class WindowNamer:
    """The sender's half. Used by the link's writer thread only."""

    def __init__(self) -> None:
        self._named: dict[tuple[int, int, int], tuple[int, tuple[int, ...]]] = {}  # keeps the tuples: ids stay valid
        self._last = 0

    def encode(self, frame: Frame) -> bytes:
        """Return the encoded FRAME, with its block ids if the receiver does not know them."""
        key = id(frame.block_ids), frame.start, frame.end
        known = self._named.get(key)
        if known is not None:
            return encode(replace(frame, block_ids=(), window=known[0]))
        self._last = self._last % _LAST_NUMBER + 1
        self._named[key] = self._last, frame.block_ids
        if len(self._named) > MAX_WINDOWS:
            del self._named[next(iter(self._named))]
        return encode(replace(frame, window=self._last))


class WindowNames:
    """The receiver's half, for a sender's blocks of `block_size` tokens. Used by that connection's thread only."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._named: dict[int, tuple[int, int, BlockWindow]] = {}

    def window_of(self, frame: Frame) -> BlockWindow:
        """Return the frame's blocks; must be called for every frame, also for skipped ones. Raises HandoffFailed."""
        if frame.block_ids:
            return self._name(frame)
        start, end, window = self._named.get(frame.window, (0, 0, None))
        if window is None or (start, end) != (frame.start, frame.end):
            raise HandoffFailed(
                f"frame {frame.number} of tokens [{frame.start}, {frame.end}) names window {frame.window}, "
                f"which {'is unknown' if window is None else f'has tokens [{start}, {end})'}"
            )
        return window

    def _name(self, frame: Frame) -> BlockWindow:
        maximum = frame.end - frame.start + 1  # a block holds at least one token
        if len(frame.block_ids) > maximum:
            raise HandoffFailed(f"frame {frame.number} names {len(frame.block_ids)} blocks, but the limit is {maximum}")
        offset = frame.start % self._block_size
        window = BlockWindow(frame.block_ids, offset, offset + frame.end - frame.start)
        self._named.pop(frame.window, None)
        self._named[frame.window] = frame.start, frame.end, window
        if len(self._named) > MAX_WINDOWS:
            del self._named[next(iter(self._named))]
        return window
