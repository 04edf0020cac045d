"""The structs of native/layer.h and native/linear.h, and the functions that run programs and choose tokens."""

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from native.engine_library import EngineLibrary

PANEL, PAIR, SCRATCH_ROWS, MAX_TILE_ROWS = 16, 32, 16, 32
FORMATS = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes of weights and pools."""

Notify = ctypes.CFUNCTYPE(None, ctypes.c_uint32)
"""`step.notify`: called with a layer's number on the thread that runs the program."""


class Operation(IntEnum):
    """enum operation."""

    ENTER = 0
    NOTIFY = 1
    ATTEND = 2
    OUT = 3
    MLP = 4
    ADD = 5
    HEAD = 6


class FinishCode(IntEnum):
    """enum finish."""

    STORE = 0
    ADD = 1
    GATED_SILU = 2


class Linear(ctypes.Structure):
    """struct linear."""

    _fields_ = (
        ("weights", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("k", ctypes.c_uint32), ("n", ctypes.c_uint32), ("format", ctypes.c_uint32), ("finish", ctypes.c_uint32),
    )  # fmt: skip


class Packing(ctypes.Structure):
    """struct packing."""

    _fields_ = (
        ("packed", ctypes.c_void_p), ("source", ctypes.c_void_p), ("columns", ctypes.c_uint32),
        ("k", ctypes.c_uint32), ("first", ctypes.c_uint32), ("step", ctypes.c_uint32), ("format", ctypes.c_uint32),
    )  # fmt: skip


class LayerStruct(ctypes.Structure):
    """struct layer."""

    _fields_ = (
        ("qkv", Linear), ("out", Linear), ("gate_up", Linear), ("down", Linear),
        ("input_norm", ctypes.c_void_p), ("post_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p), ("key_norm", ctypes.c_void_p),
        ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float), ("window", ctypes.c_int32), ("padding", ctypes.c_int32),
    )  # fmt: skip


class DecoderStruct(ctypes.Structure):
    """struct decoder."""

    _fields_ = (
        ("layers", ctypes.c_void_p), ("final_norm", ctypes.c_void_p), ("head", Linear),
        ("num_layers", ctypes.c_uint32), ("hidden", ctypes.c_uint32), ("num_heads", ctypes.c_uint32),
        ("num_kv_heads", ctypes.c_uint32), ("head_dim", ctypes.c_uint32), ("key_column", ctypes.c_uint32),
        ("value_column", ctypes.c_uint32), ("rounded", ctypes.c_uint32), ("partial", ctypes.c_uint32),
        ("pool_format", ctypes.c_uint32), ("num_slots", ctypes.c_uint32), ("epsilon", ctypes.c_float),
    )  # fmt: skip


class StepStruct(ctypes.Structure):
    """struct step."""

    _fields_ = (
        ("num_rows", ctypes.c_uint32), ("num_samples", ctypes.c_uint32), ("num_positions", ctypes.c_uint32),
        ("hidden_stride", ctypes.c_uint32), ("qkv_stride", ctypes.c_uint32), ("attended_stride", ctypes.c_uint32),
        ("inner_stride", ctypes.c_uint32), ("logits_stride", ctypes.c_uint32), ("narrow_stride", ctypes.c_uint32),
        ("passing_rows", ctypes.c_uint32),
        ("x", ctypes.c_void_p), ("scratch", ctypes.c_void_p), ("qkv", ctypes.c_void_p),
        ("attended", ctypes.c_void_p), ("inner", ctypes.c_void_p), ("partial", ctypes.c_void_p),
        ("logits", ctypes.c_void_p), ("narrow", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p), ("sine", ctypes.c_void_p),
        ("positions", ctypes.c_void_p), ("slots", ctypes.c_void_p), ("sample_rows", ctypes.c_void_p),
        ("attention", ctypes.c_void_p), ("sequences", ctypes.c_void_p), ("notify", Notify),
    )  # fmt: skip


class Instruction(ctypes.Structure):
    """struct instruction."""

    _fields_ = (("operation", ctypes.c_uint32), ("layer", ctypes.c_uint32))


class DecoderFault(IntEnum):
    """enum decoder_error; larger values are errors of attention."""

    NONE = 0
    PROGRAM = 1
    INDEX = 2
    ATTENTION = 3


@dataclass(frozen=True, slots=True)
class Functions:
    """The entry points of layer.h, best.h and draw.h; the GIL is released while they run."""

    run: Any
    pack: Any
    embed: Any
    best: Any
    draw: Any


def check_structs(library: EngineLibrary) -> None:
    """Raise NoNative for a library whose struct sizes differ from these."""
    library.check_sizes("decoder_struct_sizes", (Linear, Packing, LayerStruct, DecoderStruct, StepStruct, Instruction))


def declare(library: EngineLibrary) -> Functions:
    """Return the functions with their argument types. Raises AttributeError for a library without them."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    native = library.functions
    native.decoder_run.argtypes = (pointer, pointer, pointer, pointer, size)
    native.decoder_run.restype = ctypes.c_int
    native.decoder_pack.argtypes = (pointer, pointer)
    native.decoder_pack.restype = None
    native.decoder_embed.argtypes = (pointer, pointer, pointer, size, pointer, size)
    native.decoder_embed.restype = ctypes.c_int
    native.best_of_rows.argtypes = (pointer, pointer, size, size, size, pointer, pointer)
    native.best_of_rows.restype = None
    native.draw_from_rows.argtypes = (pointer, pointer, size, size, ctypes.c_char_p, size, pointer)
    native.draw_from_rows.restype = ctypes.c_int
    return Functions(
        native.decoder_run, native.decoder_pack, native.decoder_embed, native.best_of_rows, native.draw_from_rows
    )


def address(struct: ctypes.Structure | ctypes.Array[Any]) -> int:
    """Return the address of a struct, which the caller must keep alive."""
    return ctypes.addressof(struct)


def padded(size: int, to: int) -> int:
    """Return `size` rounded up to a multiple of `to`."""
    return -(-size // to) * to
