"""Paged attention's C interface: the structs of attention.h, and the scratch memory of one team of threads."""

import ctypes
from typing import TYPE_CHECKING, Self

from native.engine_library import EngineLibrary, Threads

if TYPE_CHECKING:
    from array import array

F32, BF16 = 0, 1
"""enum attention_dtype."""
MAX_DIM, DIM_STEP = 256, 8
WRITE, ATTEND = 1, 2
_ERRORS = ("", "out of memory", "a shape or length is wrong", "a block or slot is outside the pool")
_int32, _pointer = ctypes.c_int32, ctypes.c_void_p
_Export = ctypes.c_char * 0  # for a buffer of any size: its length is not checked


class AttentionStep(ctypes.Structure):
    """struct attention_step; `exports` keeps alive the arrays that it points to."""

    exports: "list[ctypes.Array[ctypes.c_char]]"

    _fields_ = (
        ("num_sequences", _int32), ("num_tokens", _int32), ("block_size", _int32), ("num_blocks", _int32),
        ("query_ends", _pointer), ("kv_lengths", _pointer), ("table_ends", _pointer), ("blocks", _pointer),
        ("slots", _pointer),
    )  # fmt: skip


class Rows(ctypes.Structure):
    """struct attention_rows."""

    _fields_ = (
        ("base", _pointer), ("row_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64), ("dtype", _int32),
        ("unused", _int32),
    )  # fmt: skip


class AttentionLayer(ctypes.Structure):
    """struct attention_layer."""

    _fields_ = (
        ("step", _pointer), ("keys", _pointer), ("values", _pointer), ("query", Rows), ("new_keys", Rows),
        ("new_values", Rows), ("output", Rows), ("sinks", _pointer), ("pool_dtype", _int32), ("num_heads", _int32),
        ("num_kv_heads", _int32), ("key_dim", _int32), ("value_dim", _int32), ("window", _int32),
        ("scale", ctypes.c_float), ("softcap", ctypes.c_float),
    )  # fmt: skip


def check_structs(library: EngineLibrary) -> None:
    """Raise NoNative for a library whose struct sizes differ from these."""
    library.check_sizes("attention_struct_sizes", (AttentionStep, Rows, AttentionLayer))


def step_of(
    query_ends: "array[int]", kv_lengths: "array[int]", table_ends: "array[int]", blocks: "array[int]",
    slots: "array[int]", *, block_size: int, num_blocks: int,
) -> AttentionStep:  # fmt: skip
    """Return a step over these arrays: int32, except `slots` (int64). They must not be resized while it is in use.

    `num_blocks` is the pool's size.
    """
    exports = [_Export.from_buffer(column) for column in (query_ends, kv_lengths, table_ends, blocks, slots)]
    step = AttentionStep(len(query_ends), len(slots), block_size, num_blocks, *map(ctypes.addressof, exports))
    step.exports = exports
    return step


class AttentionMemory:
    """The scratch memory and plan of one team of threads; `address` is the struct attention *. One caller at a time."""

    def __init__(self, threads: Threads) -> None:
        """Raises MemoryError. `threads` must stay open while this is used."""
        self.threads = threads
        functions = threads.library.functions
        functions.attention_open.argtypes, functions.attention_open.restype = (_pointer,), _pointer
        functions.attention_close.argtypes, functions.attention_close.restype = (_pointer,), None
        functions.attention_run.argtypes = (_pointer, _pointer, ctypes.c_int)
        self._run = functions.attention_run
        self._close = functions.attention_close
        self._address: int | None = functions.attention_open(threads.address)
        if self._address is None:
            raise MemoryError("no memory for attention's scratch buffers")

    @property
    def address(self) -> int:
        """The struct attention *. Raises ValueError after close."""
        if self._address is None:
            raise ValueError("attention's memory is closed")
        return self._address

    def run(self, layer: AttentionLayer, what: int) -> None:
        """Write the layer's new KV, compute attention, or both (WRITE, ATTEND); without the GIL.

        Raises ValueError for a layer that attention_prepare refuses, and if this memory or the team is closed.
        Raises MemoryError.
        """
        assert self.threads.address, "the team is open"
        error = self._run(self.address, ctypes.addressof(layer), what)
        if error == 1:
            raise MemoryError(f"attention: {_ERRORS[error]}")
        if error != 0:
            raise ValueError(f"attention: {_ERRORS[error]}")

    def close(self) -> None:
        """Free it. Idempotent."""
        address, self._address = self._address, None
        if address is not None:
            self._close(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_address", None) is not None:
            self.close()
