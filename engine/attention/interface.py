"""The interface of an attention backend. All backends pass the same contract tests; `reference` is the oracle.

PagedAttention (paged.py) --plan, per step--> StepAttention --write, attend, per layer--> [num_tokens, heads, dim]
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine.attention.block_tables import DecodeInputs, HostTables
from engine.step_metadata import StepMetadata


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends.

    A query at position p sees keys in (p - sliding_window, p]. `softcap` bounds scores to softcap * tanh(s / softcap).
    `sinks` is one logit per head that takes part in the softmax but has no value vector.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [num_heads]


class StepAttention(Protocol):
    """One step's attention; what its layers share is computed once."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """Write the step's own keys and values, [num_kv_heads, num_tokens, dim], to its slots in one layer's pool."""
        ...

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Return [num_tokens, num_heads, value_dim].

        `query` is [num_heads, num_tokens, head_dim]; `keys` and `values` are one layer's pool with the step's own
        tokens already in it, [num_slots, num_kv_heads, dim].
        """
        ...


class AttentionBackend(Protocol):
    """Makes a StepAttention for each step."""

    def plan(self, metadata: StepMetadata) -> StepAttention:
        """Prepare what all layers of the step share."""
        ...


class DecodeAttention(Protocol):
    """Attention of steps that decode over one set of DecodeInputs; a graph may replay what a step launches."""

    @property
    def reads_tables(self) -> bool:
        """Whether a replay of the last run reads the inputs' block tables; the run itself may always read them."""
        ...

    def prepare(self, host: HostTables) -> dict[str, list[int]] | None:
        """Update the host's side of the inputs before each run and each replay.

        Return the argument of Graph.replay: new values, by keyword, of the lists that ops took from the host.
        """
        ...

    def step(self) -> StepAttention:
        """Start one run; the state that its layers share is not used by another run."""
        ...


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose decode steps graphs can replay."""

    def plan_decode(self, inputs: DecodeInputs) -> DecodeAttention:
        """Return the attention over these inputs, whose tensors are overwritten before each step."""
        ...

    def table_widths(self, rows: int, max_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the widths, in blocks and ascending, that tables of steps with `rows` sequences should have.

        There is a graph for each width. Sequences have at most `max_blocks`; a step that needs tables wider than the
        last uses no graph.
        """
        ...

    def fixed_bytes(self, rows: int, width: int) -> int:
        """Return the device bytes that the result of one plan_decode keeps besides its inputs, after its first run.

        Assumes tables of [rows, width] and the kinds of layer that have run so far: call it after a step.
        """
        ...
