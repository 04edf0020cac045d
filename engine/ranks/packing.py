"""The message format of a step, or of a copy of blocks, to the other ranks: 32-bit integers, nothing executable.

num_tokens, num_sequences, num_carried, is_replayed, num_embedded, has_positions | token ids | per sequence: start,
count, blocks, prompt length | all tables' block ids | rows of carried tokens | three positions per token, if it has
them | per embedded range: row, count, size | their values

Sampling data is not sent: only rank 0 samples. Tokens that it has not collected yet are placeholders, in these rows.
The values of embedded ranges are raw bytes, a multiple of 4 for each: rows have an even number of values.
A step is replayed from a graph (1) on all ranks, or launched op by op on all (0).
A copy is all sources, then as many targets; a graph's shape is its rows and its table width.
"""

from array import array
from collections.abc import Sequence

from engine.step import BatchSequence, EmbeddedRows, StepBatch
from processes.rank_payloads import little_endian

_HEAD, _PER_SEQUENCE, _PER_RANGE = 6, 4, 3


def pack_step(batch: StepBatch, *, is_replayed: bool = False) -> bytes:
    """Return the step's inputs, little-endian. Raises ValueError for an invalid step, before it is sent."""
    num_rows = sum(part.count for part in batch.sequences)
    if num_rows != len(batch.token_ids):
        raise ValueError(f"the step has {len(batch.token_ids)} token ids for {num_rows} rows")
    positions, embedded = batch.positions, batch.embedded
    flags = is_replayed, len(embedded), positions is not None
    values = array("i", (len(batch.token_ids), len(batch.sequences), len(batch.carried), *flags))
    values.extend(batch.token_ids)
    for part in batch.sequences:
        values.extend((part.start, part.count, len(part.block_ids), part.prompt_length))
    for part in batch.sequences:
        values.extend(part.block_ids)
    values.extend(row for row, _ in batch.carried)
    values.extend(positions or ())
    for one in embedded:
        values.extend((one.row, one.count, len(one.values) // 4))
    return b"".join((little_endian(values).tobytes(), *(one.values for one in embedded)))


def unpack_step(payload: bytes) -> tuple[StepBatch, bool]:
    """Return the step without samples, and whether it is replayed. Raises ValueError for bytes not from `pack_step`."""
    values = array("i")
    values.frombytes(payload)  # ValueError for a length that is not a multiple of 4
    values = little_endian(values)
    if len(values) < _HEAD:
        raise ValueError(f"a step has at least {4 * _HEAD} bytes, not {len(payload)}")
    num_tokens, num_sequences, num_carried, is_replayed, num_embedded, has_positions = values[:_HEAD]
    heads = _HEAD + num_tokens
    tables = heads + _PER_SEQUENCE * num_sequences
    counts = values[heads + 2 : tables : _PER_SEQUENCE]
    end = tables + sum(counts)
    places = end + num_carried
    ranges = places + 3 * num_tokens * has_positions
    first_value = ranges + _PER_RANGE * num_embedded
    sizes = values[ranges + 2 : first_value : _PER_RANGE]
    if (
        min(num_tokens, num_sequences, num_carried, num_embedded, *counts, *sizes, 0) < 0
        or first_value + sum(sizes) != len(values)
        or {is_replayed, has_positions} - {0, 1}
    ):  # fmt: skip
        raise ValueError(f"{len(values)} integers are not a step of {num_tokens} tokens in {num_sequences} sequences")
    parts, first = [], tables
    for head in range(heads, tables, _PER_SEQUENCE):
        start, count, blocks, prompt_length = values[head : head + _PER_SEQUENCE]
        parts.append(BatchSequence(start, count, tuple(values[first : first + blocks]), prompt_length))
        first += blocks
    carried = tuple((row, 0) for row in values[end:places])
    embedded = _embedded_rows(values[ranges:first_value], memoryview(payload)[4 * first_value :])
    positions = values[places:ranges] if has_positions else None
    batch = StepBatch(tuple(values[_HEAD:heads]), tuple(parts), (), (), (), carried, embedded, positions)
    return batch, bool(is_replayed)


def pack_copies(sources: Sequence[int], targets: Sequence[int]) -> bytes:
    """Return source and target blocks or slots as bytes. Raises ValueError if their numbers differ."""
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} blocks cannot be copied to {len(targets)}")
    return little_endian(array("i", (*sources, *targets))).tobytes()


def _embedded_rows(ranges: Sequence[int], values: memoryview) -> tuple[EmbeddedRows, ...]:
    made, first = list[EmbeddedRows](), 0
    for place in range(0, len(ranges), _PER_RANGE):
        row, count, size = ranges[place : place + _PER_RANGE]
        made.append(EmbeddedRows(row, count, values[first : first + 4 * size]))
        first += 4 * size
    return tuple(made)


def pack_shape(shape: tuple[int, int]) -> bytes:
    """Return a graph's rows and table width as bytes."""
    return little_endian(array("i", shape)).tobytes()


def unpack_shape(payload: bytes) -> tuple[int, int]:
    """Return rows and width. Raises ValueError for bytes not from `pack_shape`."""
    values = array("i")
    values.frombytes(payload)
    rows, width = little_endian(values)
    return rows, width


def unpack_copies(payload: bytes) -> tuple[list[int], list[int]]:
    """Return sources and targets. Raises ValueError for bytes not from `pack_copies`."""
    values = array("i")
    values.frombytes(payload)
    if len(values) % 2:
        raise ValueError(f"{len(values)} integers are not pairs of blocks")
    listed = little_endian(values).tolist()
    return listed[: len(listed) // 2], listed[len(listed) // 2 :]
