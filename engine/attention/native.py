"""Attention on CPU by our own kernel (native/attention.h): blocks are read in place, and nothing is gathered."""

import ctypes

import torch

from engine.attention.interface import AttentionOptions
from engine.step_metadata import StepMetadata
from native.attention import (
    ATTEND,
    BF16,
    DIM_STEP,
    F32,
    MAX_DIM,
    WRITE,
    AttentionLayer,
    AttentionMemory,
    AttentionStep,
    Rows,
    step_of,
)
from native.engine_library import Threads

_DTYPES = {torch.float32: F32, torch.bfloat16: BF16}


class NativeAttention:
    """The native backend. Owns scratch memory for one team of threads; one thread calls it."""

    def __init__(self, threads: Threads) -> None:
        """`threads` must outlive this object; they may run other work between two layers."""
        self.memory = AttentionMemory(threads)

    def plan(self, metadata: StepMetadata) -> "NativeStep":
        """Nothing is computed before the first layer."""
        return NativeStep(metadata, self.memory)


def supports(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether the kernel supports these dtypes and dims; the pools must be contiguous."""
    dims = (keys.shape[-1], values.shape[-1])
    return (
        query.dtype in _DTYPES
        and keys.dtype in _DTYPES
        and keys.dtype == values.dtype
        and all(0 < dim <= MAX_DIM and dim % DIM_STEP == 0 for dim in dims)
    )


class NativeStep:
    """One step: its int32 arrays are passed to each layer without a copy."""

    def __init__(self, metadata: StepMetadata, memory: AttentionMemory) -> None:
        self._metadata = metadata
        self._memory = memory
        self._step: AttentionStep | None = None

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write. Raises ValueError for shapes that do not fit the step or the pool."""
        _check_pools(keys, values)
        num_tokens = len(self._metadata.packed.slots)
        _check_shape("new keys", new_keys, (keys.shape[1], num_tokens, keys.shape[2]))
        _check_shape("new values", new_values, (keys.shape[1], num_tokens, values.shape[2]))
        new_keys, new_values = _dense(new_keys), _dense(new_values)
        layer = self._layer(keys, values)
        layer.new_keys, layer.new_values = _rows(new_keys), _rows(new_values)
        layer.num_heads = keys.shape[1]
        self._memory.run(layer, WRITE)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend. Raises ValueError for shapes that do not fit the step or the pool."""
        num_heads, num_tokens = query.shape[0], len(self._metadata.packed.slots)
        _check_pools(keys, values)
        _check_shape("query", query, (num_heads, num_tokens, keys.shape[2]))
        if num_heads % keys.shape[1]:
            raise ValueError(f"{num_heads} query heads are not a multiple of the pool's {keys.shape[1]} KV heads")
        if options.sinks is not None:
            _check_shape("sinks", options.sinks, (num_heads,))
        query = _dense(query)
        sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
        output = query.new_empty(num_tokens, num_heads, values.shape[-1])
        layer = self._layer(keys, values)
        layer.query, layer.output = _rows(query), _rows(output.transpose(0, 1))
        layer.num_heads, layer.scale = num_heads, options.scaling
        layer.window, layer.softcap = options.sliding_window or 0, options.softcap or 0.0
        layer.sinks = None if sinks is None else sinks.data_ptr()
        self._memory.run(layer, ATTEND)
        return output

    def _layer(self, keys: torch.Tensor, values: torch.Tensor) -> AttentionLayer:
        assert keys.is_contiguous(), "the pool's keys are contiguous"
        assert values.is_contiguous(), "the pool's values are contiguous"
        step = self._packed_step(keys.shape[0])
        layer = AttentionLayer()
        layer.step, layer.keys, layer.values = ctypes.addressof(step), keys.data_ptr(), values.data_ptr()
        layer.pool_dtype = _DTYPES[keys.dtype]
        layer.num_kv_heads, layer.key_dim, layer.value_dim = keys.shape[1], keys.shape[2], values.shape[2]
        return layer

    def _packed_step(self, num_slots: int) -> AttentionStep:
        if self._step is None:
            metadata, packed = self._metadata, self._metadata.packed
            self._step = step_of(
                packed.query_ends, packed.kv_lengths, packed.table_ends, packed.blocks, packed.slots,
                block_size=metadata.block_size, num_blocks=num_slots // metadata.block_size,
            )  # fmt: skip
        self._step.num_blocks = num_slots // self._metadata.block_size  # layers may have pools of different sizes
        return self._step


def _check_pools(keys: torch.Tensor, values: torch.Tensor) -> None:
    if keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2]:
        raise ValueError(
            f"the pool's keys have shape {list(keys.shape)} and its values {list(values.shape)}, but both must have "
            "three dimensions and the same slots and heads"
        )
    if keys.dtype != values.dtype or keys.dtype not in _DTYPES:
        raise ValueError(
            f"keys of {keys.dtype} and values of {values.dtype}: both must be one of {sorted(map(str, _DTYPES))}"
        )


def _check_shape(what: str, tensor: torch.Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise ValueError(f"the shape of {what} is {list(tensor.shape)}, but must be {list(wanted)}")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"the dtype of {what} is {tensor.dtype}, but must be one of {sorted(map(str, _DTYPES))}")


def _dense(rows: torch.Tensor) -> torch.Tensor:
    """Return rows in which the numbers of one head and token are contiguous."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _rows(rows: torch.Tensor) -> Rows:
    """Return the address and strides of [heads, num_tokens, dim]."""
    return Rows(rows.data_ptr(), rows.stride(1), rows.stride(0), _DTYPES[rows.dtype])
