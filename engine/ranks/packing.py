"""The message format of a step, or of a copy of blocks, to the other ranks: 32-bit integers, nothing executable.

num_tokens, num_sequences, num_carried, is_replayed, num_embedded, has_positions | token ids | per sequence: start,
count, blocks, prompt length, spans | all tables' block ids | per span: start, end | rows of carried tokens | three
positions per token, if it has them | per embedded range: row, count, size | their values

Sampling data is not sent: only rank 0 samples. Tokens that it has not collected yet are placeholders, in the rows
of carried tokens.
The values of embedded ranges are raw bytes, a multiple of 4 for each: rows have an even number of values.
A step is replayed from a graph (1) on all ranks, or launched op by op on all (0).
A copy is all sources, then as many targets; a graph's shape is its rows and its table width.
"""

from array import array
from collections.abc import Sequence

from engine.step import BatchSequence, EmbeddedRows, StepBatch
from processes.rank_payloads import little_endian

_HEAD, _PER_SEQUENCE, _PER_RANGE = 6, 5, 3


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
        values.extend((part.start, part.count, len(part.block_ids), part.prompt_length, len(part.spans)))
    for part in batch.sequences:
        values.extend(part.block_ids)
    values.extend(bound for part in batch.sequences for span in part.spans for bound in span)
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
        raise ValueError(f"the step has {len(payload)} bytes, but must have at least {4 * _HEAD} bytes")
    num_tokens, num_sequences, num_carried, is_replayed, num_embedded, has_positions = values[:_HEAD]
    rest = _Rest(values, f"{len(values)} integers are not a step of {num_tokens} tokens in {num_sequences} sequences")
    if {is_replayed, has_positions} - {0, 1}:
        raise ValueError(rest.error)
    token_ids = tuple(rest.take(num_tokens))
    heads = [rest.take(_PER_SEQUENCE) for _ in range(rest.checked(num_sequences, _PER_SEQUENCE))]
    tables = [tuple(rest.take(num_blocks)) for _, _, num_blocks, _, _ in heads]
    spans = [tuple(tuple(rest.take(2)) for _ in range(rest.checked(num_spans, 2))) for *_, num_spans in heads]
    parts = tuple(
        BatchSequence(start, count, table, prompt_length, own)  # type: ignore[arg-type]
        for (start, count, _, prompt_length, _), table, own in zip(heads, tables, spans, strict=True)
    )
    carried = tuple((row, 0) for row in rest.take(num_carried))
    positions = rest.take(3 * num_tokens) if has_positions else None
    ranges = [rest.take(_PER_RANGE) for _ in range(rest.checked(num_embedded, _PER_RANGE))]
    embedded = tuple(EmbeddedRows(row, count, memoryview(rest.take(size)).cast("B")) for row, count, size in ranges)
    rest.end()
    return StepBatch(token_ids, parts, (), (), (), carried, embedded, positions), bool(is_replayed)


class _Rest:
    """Reads the integers of a step after its head, in order. Raises ValueError for a number that cannot be right."""

    def __init__(self, values: "array[int]", error: str) -> None:
        self._values, self._at, self.error = values, _HEAD, error

    def take(self, count: int) -> "array[int]":
        """Return the next `count` integers."""
        end = self._at + self.checked(count, 1)
        taken, self._at = self._values[self._at : end], end
        return taken

    def checked(self, count: int, size: int) -> int:
        """Return `count` after checking that enough integers follow: `size` for each of that many items."""
        if not 0 <= count * size <= len(self._values) - self._at:
            raise ValueError(self.error)
        return count

    def end(self) -> None:
        """Check that nothing follows."""
        if self._at != len(self._values):
            raise ValueError(self.error)


def pack_copies(sources: Sequence[int], targets: Sequence[int]) -> bytes:
    """Return source and target blocks or slots as bytes. Raises ValueError if there are not as many targets."""
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} blocks cannot be copied to {len(targets)}")
    return little_endian(array("i", (*sources, *targets))).tobytes()


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
