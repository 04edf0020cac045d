"""Input tensors and attention metadata of one step, built once on the host from a StepBatch."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from engine.step import BatchSequence, EmbeddedRows, StepBatch
from engine.transfers import upload


@dataclass(slots=True)
class PackedStep:
    """The step's inputs for native kernels, as arrays on the host.

    Sequence i has rows query_ends[i - 1] to query_ends[i] and blocks[table_ends[i - 1]] to blocks[table_ends[i]].
    """

    query_ends: "array[int]"  # [num_sequences] int32, like the next two
    kv_lengths: "array[int]"
    table_ends: "array[int]"
    blocks: "array[int]"  # int32
    slots: "array[int]"  # [num_tokens] int64, like all that follow
    token_ids: "array[int]"  # [num_tokens]
    positions: "array[int]"  # [num_tokens]
    sample_rows: "array[int]"  # [num_samples]


class StepMetadata:
    """One step's inputs. A slot is one token's place in the pool: block * block_size + offset.

    The tensors are made together at the first use of one: native kernels read only the arrays of `packed`, and each
    torch call delays a step of many sequences. `packed` has placeholders for tokens that the previous step samples.
    """

    def __init__(
        self, block_size: int, sequences: Sequence[BatchSequence], packed: PackedStep, device: torch.device,
        embedded: Sequence[EmbeddedRows] = (), grid: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """`grid` [num_tokens, 3] int64, on the host: three positions for each row; None if each row's are equal."""
        self.block_size, self.sequences, self.packed, self._device = block_size, sequences, packed, device
        self.embedded, self.grid = embedded, grid

    @property
    def token_ids(self) -> torch.Tensor:
        """Token id of each row: [1, num_tokens] int64."""
        return self._tensors[0][None]

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row in its sequence: [1, num_tokens] int64, or three positions: [3, 1, num_tokens]."""
        return self._tensors[1][None] if self.grid is None else upload(self.grid.T.contiguous(), self._device)[:, None]

    @property
    def slots(self) -> torch.Tensor:
        """Slot of each row: [num_tokens] int64."""
        return self._tensors[2]

    @property
    def sample_rows(self) -> torch.Tensor:
        """Rows to sample: [num_samples] int64."""
        return self._tensors[3]

    def carry(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Copy tokens sampled by the previous step, [len(rows)], into these rows of `token_ids`, on the device."""
        self._tensors[0].index_copy_(0, rows, token_ids.to(torch.int64))

    def embed(self, rows: torch.Tensor, dtype: torch.dtype) -> None:
        """Put the embeddings of images, in the model's `dtype`, into their rows of [num_tokens, hidden_size]."""
        for one in self.embedded:
            values = torch.frombuffer(bytearray(one.values), dtype=dtype).view(one.count, -1)
            rows[one.row : one.row + one.count] = upload(values, self._device)

    def rows(self) -> Iterator[tuple[slice, BatchSequence]]:
        """Yield (rows of the flattened step, sequence) for each sequence."""
        for end, sequence in zip(self.packed.query_ends, self.sequences, strict=True):
            yield slice(end - sequence.count, end), sequence

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """Token ids, positions, slots and sampled rows, in one copy to the device."""
        packed = self.packed
        parts = packed.token_ids, packed.positions, packed.slots, packed.sample_rows
        joined = array("q")
        for part in parts:
            joined.extend(part)
        values = torch.frombuffer(joined, dtype=torch.int64) if joined else torch.empty(0, dtype=torch.int64)
        return torch.split(upload(values, self._device), [len(part) for part in parts])


def build(batch: StepBatch, *, block_size: int, device: torch.device) -> StepMetadata:
    """Return the metadata of `batch`. Raises ValueError for a block table too short for its sequence."""
    query_ends, kv_lengths, table_ends = array("i"), array("i"), array("i")
    blocks, slots, positions = array("i"), array("q"), array("q")
    for sequence in batch.sequences:
        start, end, block_ids = sequence.start, sequence.start + sequence.count, sequence.block_ids
        if end > len(block_ids) * block_size:
            raise ValueError(f"{len(block_ids)} blocks of {block_size} cannot hold {end} tokens")
        blocks.extend(block_ids)
        if sequence.count == 1:  # a step has many of these, and each numpy call would delay it
            slots.append(block_ids[start // block_size] * block_size + start % block_size)
            positions.append(start)
        else:
            slots.frombytes(_slots(block_ids, start, end, block_size))
            positions.frombytes(np.arange(start, end, dtype=np.int64).tobytes())
        query_ends.append(len(slots))
        kv_lengths.append(end)
        table_ends.append(len(blocks))
    if len(batch.token_ids) != len(slots):
        raise ValueError(f"the step has {len(batch.token_ids)} token ids for {len(slots)} rows")
    token_ids, sample_rows = array("q", batch.token_ids), array("q", [sample.row for sample in batch.samples])
    grid = None if batch.positions is None else torch.tensor(batch.positions, dtype=torch.int64).view(-1, 3)
    if grid is not None and bool((grid == grid[:, :1]).all()):
        positions, grid = array("q", grid[:, 0].tolist()), None
    packed = PackedStep(query_ends, kv_lengths, table_ends, blocks, slots, token_ids, positions, sample_rows)
    return StepMetadata(block_size, batch.sequences, packed, device, batch.embedded, grid)


def _slots(block_ids: Sequence[int], start: int, end: int, block_size: int) -> bytes:
    """Return the slots of tokens [start, end) as int64."""
    first = start // block_size
    used = np.array(block_ids[first : -(-end // block_size)], np.int64)
    slots = used[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1)[start - first * block_size : end - first * block_size].tobytes()
