"""Compute how many KV blocks fit the pool's memory. Pure: the caller measures the machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from wire.errors import ConfigError
from wire.kv_layout import ALIGNMENT, KvTensor

DEFAULT_CPU_BYTES = 1 << 30
MIN_SEQUENCE_TOKENS = 16
_SHORT_MEMORY_SHARE = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The pool's size and capacity; `reserve_note` describes memory that the budget leaves free."""

    num_blocks: int
    block_size: int
    kv_bytes: int
    max_model_len: int
    reserve_note: str = ""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence: the smaller of the pool's and the model's limit."""
        return min(self.num_blocks * self.block_size, self.max_model_len)

    def describe(self) -> str:
        """Return one line for the user."""
        return (
            f"KV pool: {self.kv_bytes / 2**20:.0f} MiB, {self.num_blocks} blocks of {self.block_size} tokens, "
            f"longest sequence {self.longest_sequence} tokens (model: {self.max_model_len})"
            f"{f', {self.reserve_note}' if self.reserve_note else ''}"
        )


def cpu_budget(requested_bytes: int | None, available_bytes: int) -> int:
    """Return the pool's bytes on a CPU: as requested, else 1 GiB or a quarter of the free memory if that is less."""
    if requested_bytes is None:
        return min(DEFAULT_CPU_BYTES, available_bytes // _SHORT_MEMORY_SHARE)
    return _check_requested(requested_bytes, available_bytes)


def device_budget(
    requested_bytes: int | None, utilization: float, total_bytes: int, free_bytes: int, headroom_bytes: int = 0
) -> int:  # fmt: skip
    """Return the pool's bytes on a device: as requested, else its memory times `utilization` minus memory in use.

    Call it after the weights are loaded, so that they count as in use. `headroom_bytes` are left free for steps.
    """
    if not 0 < utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization is {utilization}, but must be above 0 and at most 1")
    if requested_bytes is not None:
        return _check_requested(requested_bytes, free_bytes)
    return max(0, int(total_bytes * utilization) - (total_bytes - free_bytes) - headroom_bytes)


def plan_pool(
    tensors: Sequence[KvTensor], *, budget_bytes: int, block_size: int, max_model_len: int, reserve_note: str = "",
    spare_blocks: int = 0,
) -> MemoryPlan:  # fmt: skip
    """Return the largest pool within `budget_bytes`. Raises ConfigError if not even the shortest sequence fits.

    `reserve_note` describes, for messages, memory that the budget leaves free. `spare_blocks` of the budget are for
    padding rows of graphs, and not part of the plan.
    """
    block_bytes = block_size * sum(tensor.token_bytes for tensor in tensors)
    num_blocks = (budget_bytes - len(tensors) * (ALIGNMENT - 1)) // block_bytes
    needed = least_blocks(block_size, max_model_len)
    if num_blocks < needed + spare_blocks:
        left = f" ({reserve_note})" if reserve_note else ""
        graphs = f", and graphs {spare_blocks} more" if spare_blocks else ""
        fitting = "1 block" if num_blocks == 1 else f"{max(0, num_blocks)} blocks"
        minimum = least_bytes(tensors, block_size, max_model_len, spare_blocks)
        raise ConfigError(
            f"{budget_bytes} bytes of KV memory{left} are {fitting} of {block_size} tokens "
            f"({block_bytes} bytes each); a sequence of {MIN_SEQUENCE_TOKENS} tokens needs {needed}{graphs}: "
            f"raise --kv-cache-memory to {minimum} or more"
        )
    num_blocks -= spare_blocks
    return MemoryPlan(num_blocks, block_size, num_blocks * block_bytes, max_model_len, reserve_note)


def least_blocks(block_size: int, max_model_len: int) -> int:
    """Return the number of blocks that a pool must have at least: those of the shortest sequence that must fit."""
    return -(-min(MIN_SEQUENCE_TOKENS, max_model_len) // block_size)


def least_bytes(tensors: Sequence[KvTensor], block_size: int, max_model_len: int, spare_blocks: int = 0) -> int:
    """Return the smallest budget that plan_pool accepts for these tensors."""
    block_bytes = block_size * sum(tensor.token_bytes for tensor in tensors)
    return (least_blocks(block_size, max_model_len) + spare_blocks) * block_bytes + len(tensors) * (ALIGNMENT - 1)


def _check_requested(requested_bytes: int, free_bytes: int) -> int:
    if not 0 < requested_bytes <= free_bytes:
        raise ConfigError(
            f"--kv-cache-memory is {requested_bytes} bytes, but must be above 0 and at most the {free_bytes} free"
        )
    return requested_bytes
