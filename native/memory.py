"""Describe bytes in memory: regions (contiguous), runs (evenly spaced rows), RegionRuns (runs in a region at a base).

    region | ........ row ...stride... row ........ row ...stride... row .... |
                      ^ base + offset              ^ base + offset

Runs have no base: those of a block table are made once and used for every tensor that has the same token size.
"""

import ctypes
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import add, mul, sub
from typing import NamedTuple, Self

_FIELDS = 4


class MemoryRun(NamedTuple):
    """`rows` rows of `row_bytes` bytes; each starts `stride` bytes after the one before, the first at `offset`."""

    offset: int
    row_bytes: int
    stride: int = 0
    rows: int = 1


class Runs:
    """Runs in order, packed for native code. Immutable. `extent` is the end of the furthest row."""

    __slots__ = ("_words", "address", "extent", "num_bytes", "num_rows")

    def __init__(self, runs: Iterable[MemoryRun | tuple[int, int, int, int]]) -> None:
        """Raises ValueError for a negative number, an empty run, and rows that overlap."""
        columns = tuple(zip(*runs, strict=True))
        self._pack(*(columns or ((), (), (), ())))

    @classmethod
    def of_slots(
        cls, spans: Iterable[tuple[int, int]], slot_bytes: int, *, skip: int = 0, row_bytes: int | None = None
    ) -> Self:
        """Return `row_bytes` bytes of each slot from byte `skip` on, by default the rest; a span is (first, count)."""
        width = slot_bytes - skip if row_bytes is None else row_bytes
        if skip < 0 or skip + width > slot_bytes:
            raise ValueError(f"bytes [{skip}, {skip + width}) are not within a slot of {slot_bytes} bytes")
        firsts, counts = tuple(zip(*spans, strict=True)) or ((), ())
        offsets = [first * slot_bytes + skip for first in firsts]
        runs = cls.__new__(cls)
        if width == slot_bytes:
            runs._pack(offsets, [count * slot_bytes for count in counts], [0] * len(offsets), [1] * len(offsets))
        else:
            runs._pack(offsets, [width] * len(offsets), [slot_bytes] * len(offsets), counts)
        return runs

    @classmethod
    def joined(cls, parts: Iterable[tuple[int, "Runs"]]) -> Self:
        """Return the runs of all parts (distance, runs) in order, each shifted by its distance in bytes."""
        runs = cls.__new__(cls)
        words = array("Q")
        runs.num_rows = runs.num_bytes = runs.extent = 0
        for distance, part in parts:
            moved = part._words[:]
            if distance:
                moved[::_FIELDS] = array("Q", map(add, part._words[::_FIELDS], repeat(distance)))
            words += moved
            runs.num_rows += part.num_rows
            runs.num_bytes += part.num_bytes
            runs.extent = max(runs.extent, distance + part.extent)
        runs._words, runs.address = words, words.buffer_info()[0]
        return runs

    def repeated(self, times: int, step: int) -> "Runs":
        """Return these runs `times` times, each `step` bytes after the previous. Raises ValueError if they overlap."""
        if len(self._words) == _FIELDS and self.num_rows == 1:
            return Runs([(self._words[0], self._words[1], step, times)])
        return Runs.joined((number * step, self) for number in range(times))

    def rows(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes) of every row."""
        words = iter(self._words)
        for offset, row_bytes, stride, rows in zip(words, words, words, words, strict=True):
            for row in range(rows):
                yield offset + row * stride, row_bytes

    def _pack(
        self, offsets: Sequence[int], row_bytes: Sequence[int], strides: Sequence[int], rows: Sequence[int]
    ) -> None:
        # Column by column, for speed: thousands of runs are common, and a request waits for them.
        columns = (offsets, row_bytes, strides, rows)
        words = array("Q", bytes(8 * _FIELDS * len(offsets)))
        try:
            for field, column in enumerate(columns):
                words[field::_FIELDS] = array("Q", column)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"a run is four numbers from 0 to 2^64 - 1: {error}") from error
        single = max(rows, default=1) <= 1
        if not all(row_bytes) or not all(rows) or not (single or all(map(_is_good, *columns))):
            bad = next(MemoryRun(*run) for run in zip(*columns, strict=True) if not _is_good(*run))
            raise ValueError(f"{bad} has no bytes, or rows that overlap")
        last_rows = offsets if single else map(add, offsets, map(mul, strides, map(sub, rows, repeat(1))))
        self._words = words
        self.address = words.buffer_info()[0]
        self.num_rows = sum(rows)
        self.num_bytes = sum(row_bytes if single else map(mul, row_bytes, rows))
        self.extent = max(map(add, last_rows, row_bytes), default=0)


def _is_good(_: int, row_bytes: int, stride: int, rows: int) -> bool:
    return row_bytes > 0 and rows > 0 and (rows == 1 or stride >= row_bytes)


class Region:
    """Contiguous memory and its address, looked up once. It keeps the memory alive; there is nothing to close.

    The owner of the memory drops its regions before unmapping it. A thread that is still moving bytes has a reference
    too, so the memory is freed when that thread is done.
    """

    __slots__ = ("address", "num_bytes", "readonly", "view")

    def __init__(self, memory: "memoryview | bytes | bytearray | array[int]") -> None:
        """Raises BufferError for memory that is not contiguous."""
        view = memoryview(memory)
        if not view.c_contiguous:
            raise BufferError("a region must be contiguous memory")
        self.view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        self.num_bytes, self.readonly = self.view.nbytes, self.view.readonly
        self.address = _address_of(self.view)


class RegionRuns(NamedTuple):
    """Runs of a region, their offsets counted from `base`."""

    region: Region
    base: int
    runs: Runs


class StopFlag:
    """Ends a move early. Set from any thread; never reset."""

    __slots__ = ("_word", "address")

    def __init__(self) -> None:
        self._word = ctypes.c_int32(0)
        self.address = ctypes.addressof(self._word)

    def set(self) -> None:
        """End every move that uses this flag."""
        self._word.value = 1

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._word.value != 0


def check_place(place: RegionRuns) -> None:
    """Raise IndexError unless every run is in the region."""
    region, base, runs = place
    if base < 0 or base + runs.extent > region.num_bytes:
        raise IndexError(f"the runs end at byte {base} + {runs.extent}, but the region has {region.num_bytes}")


def check_move(source: RegionRuns, target: RegionRuns) -> None:
    """Raise IndexError for runs past their region, ValueError for unequal sizes and a read-only target."""
    check_place(source)
    check_place(target)
    if source.runs.num_bytes != target.runs.num_bytes:
        raise ValueError(f"the source has {source.runs.num_bytes} bytes, but the target has {target.runs.num_bytes}")
    if target.region.readonly:
        raise ValueError("the target is read-only")


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython's stable ABI; it gives the address of read-only memory, which `from_buffer` refuses."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


def _address_of(view: memoryview) -> int:
    python = ctypes.PyDLL(None)
    get, release = python.PyObject_GetBuffer, python.PyBuffer_Release
    get.argtypes, release.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int), (ctypes.c_void_p,)
    release.restype = None
    buffer = _PyBuffer()
    get(view, ctypes.addressof(buffer), 0)  # raises its own error
    address = buffer.buf or 0
    release(ctypes.addressof(buffer))  # the memoryview itself keeps the memory alive
    return int(address)
