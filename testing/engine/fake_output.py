"""The arithmetic model's output: tokens and log probabilities made from a checksum of its KV. No torch.

The checksum selects the likeliest token; the token d places after it (modulo the vocabulary) has the log probability
-(d + 1). A random draw changes the choice, as a temperature would; banned tokens are skipped.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from engine.sampling.counter_hash import hash64, uniform
from engine.step import BatchSequence, Candidates, PoolingRows, SampleRow, StepBatch, StepOutput
from wire.errors import InvalidRequest, PdserveError
from wire.types import TokenLogprobs


def rows_read(batch: StepBatch) -> list[int]:
    """Return the flattened rows whose checksums `answer` needs: the sampled, the scored, then the pooled ones."""
    pooled = (row for rows in batch.pooling_rows for row in range(rows.row, rows.row + rows.count))
    return [*(sample.row for sample in batch.samples), *(score.row for score in batch.scores), *pooled]


def part_until(batch: StepBatch, row: int) -> BatchSequence:
    """Return the part of the step's sequence that ends with flattened row `row`."""
    first = 0
    for part in batch.sequences:
        if row < first + part.count:
            return BatchSequence(part.start, row - first + 1, part.block_ids)
        first += part.count
    raise IndexError(f"row {row} is not one of the step's {first}")


def checksum_of(parts: Iterable[bytes | memoryview]) -> int:
    """Return 32 bits that depend on every byte of the parts."""
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def answer(batch: StepBatch, checksums: Sequence[int], vocab_size: int) -> StepOutput:
    """Return the step's output; `checksums` are those of the `rows_read`."""
    chosen = [choose_token(c, row, vocab_size) for row, c in zip(batch.samples, checksums, strict=False)]
    failures: list[tuple[int, PdserveError]] = [
        (i, InvalidRequest("no token is left to choose")) for i, token_id in enumerate(chosen) if token_id is None
    ]
    token_ids = [token_id or 0 for token_id in chosen]
    rows = list(zip(batch.samples, token_ids, checksums, strict=False))
    logprobs = [
        None
        if row.params.logprobs is None or row.candidates
        else logprobs_of(c, token_id, row.params.wanted_logprobs, vocab_size)
        for row, token_id, c in rows
    ]
    candidates = [_candidates(c, row, vocab_size) if row.candidates else None for row, _, c in rows]
    scores = [
        logprobs_of(c, score.token_id, score.wanted, vocab_size)
        for score, c in zip(batch.scores, checksums[len(token_ids) :], strict=False)
    ]
    rest = iter(checksums[len(token_ids) + len(scores) :])
    pooled = [_pooled(rows, rest) for rows in batch.pooling_rows]
    return StepOutput(token_ids, logprobs, candidates, scores, failures, pooled=pooled)


def choose_token(checksum: int, sample: SampleRow, vocab_size: int) -> int | None:
    """Return the token: the checksum alone selects it if greedy, else also the draw; None if all are banned."""
    params = sample.params
    draw = 0 if params.temperature == 0 else int(uniform(params.seed, sample.sequence, sample.position) * (1 << 24))
    return next(_choices(hash64(checksum, draw), sample, vocab_size), None)


def logprobs_of(checksum: int, token_id: int, wanted: int | tuple[int, ...], vocab_size: int) -> TokenLogprobs:
    """Return the log probability of `token_id`, and those of the `wanted` best tokens or of the `wanted` ids."""
    best = hash64(checksum, 0)
    distance = (token_id - best) % vocab_size
    tops = range(min(wanted, vocab_size)) if isinstance(wanted, int) else [(i - best) % vocab_size for i in wanted]
    return TokenLogprobs(
        -(distance + 1.0),
        distance + 1,
        tuple((best + i) % vocab_size for i in tops),
        tuple(-(i + 1.0) for i in tops),
    )


def _pooled(rows: PoolingRows, checksums: Iterator[int]) -> list[float]:
    """Return the vector of all rows, or with `each` that of each row, one after another."""
    own = list(islice(checksums, rows.count))
    return [value for part in ([one] for one in own) for value in _vector(part)] if rows.each else [*_vector(own)]


def _vector(checksums: Iterable[int]) -> tuple[float, float]:
    """Return the sum of these rows' states; a state is (scaled checksum, 1)."""
    states = [checksum / (1 << 32) for checksum in checksums]
    return sum(states), float(len(states))


def _candidates(checksum: int, sample: SampleRow, vocab_size: int) -> Candidates:
    token_ids = tuple(islice(_choices(hash64(checksum, 0), sample, vocab_size), sample.candidates))
    wanted = sample.params.wanted_logprobs
    found = tuple(logprobs_of(checksum, one, wanted, vocab_size) for one in token_ids)
    described = () if sample.params.logprobs is None else found
    return Candidates(token_ids, tuple(one.logprob for one in found), described)


def _choices(first: int, sample: SampleRow, vocab_size: int) -> Iterator[int]:
    """Yield the tokens that may be chosen, from `first` on."""
    banned, allowed = set(sample.banned), set(sample.params.allowed_token_ids)
    for i in range(vocab_size):
        token_id = (first + i) % vocab_size
        if token_id not in banned and (not allowed or token_id in allowed) and _is_in_mask(token_id, sample.mask):
            yield token_id


def _is_in_mask(token_id: int, mask: memoryview | None) -> bool:
    if mask is None:
        return True
    octets = mask.cast("B")
    return token_id // 8 < len(octets) and bool(octets[token_id // 8] >> token_id % 8 & 1)
