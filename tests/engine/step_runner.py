"""Runs prompts through a Model step by step, as the engine does, with blocks allocated at random."""

import random
from collections.abc import Iterator, Sequence

from engine.core import EngineCore
from engine.interface import Chunk
from engine.step import BatchSequence, Model, SampleRow, StepBatch
from wire.types import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def generate(
    model: Model, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int, params: SamplingParams = GREEDY
) -> list[list[int]]:
    """Return `num_tokens` tokens of each prompt; all share each step, with `chunk` prompt tokens of each at most."""
    size = model.info.layout.block_size
    free = list(range(model.info.layout.num_blocks))
    random.Random(3).shuffle(free)
    tables = [tuple(free.pop() for _ in range(-(-(len(prompt) + num_tokens) // size))) for prompt in prompts]
    known = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    wanted = [len(prompt) + num_tokens for prompt in prompts]
    while any(len(tokens) < want for tokens, want in zip(known, wanted, strict=True)):
        running = [i for i, want in enumerate(wanted) if len(known[i]) < want]
        parts = [_part(known[i], computed[i], chunk, tables[i]) for i in running]
        ends = [i for i, part in zip(running, parts, strict=True) if part.kv_length == len(known[i])]
        samples = tuple(_samples(running, parts, known, prompts, params))
        ids = [t for i, part in zip(running, parts, strict=True) for t in known[i][part.start : part.kv_length]]
        tokens = model.launch(StepBatch(tuple(ids), tuple(parts), samples)).collect().token_ids
        for i, part in zip(running, parts, strict=True):
            computed[i] = part.kv_length
        for i, token in zip(ends, tokens, strict=True):
            known[i].append(token)
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]


def _part(known: Sequence[int], computed: int, chunk: int, table: tuple[int, ...]) -> BatchSequence:
    return BatchSequence(computed, min(chunk, len(known) - computed), table)


def _samples(
    running: Sequence[int],
    parts: Sequence[BatchSequence],
    known: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
) -> Iterator[SampleRow]:
    row = 0
    for i, part in zip(running, parts, strict=True):
        row += part.count
        if part.kv_length == len(known[i]):
            yield SampleRow(row - 1, params, 0, len(known[i]) - len(prompts[i]))


def copy_chunks(
    source: Model | EngineCore,
    to: Model | EngineCore,
    chunks: Sequence[Chunk],
    prompt_id: str,
    block_ids: tuple[int, ...],
) -> None:
    """Copy the KV of a prompt's chunks, tensor by tensor, into its place in `block_ids` of the other pool."""
    for chunk in (chunk for chunk in chunks if chunk.prompt_id == prompt_id):
        read, written = source.memories[0].buffer, to.memories[0].buffer
        for tensor in range(len(to.info.layout.tensors)):
            runs = source.info.layout.runs(tensor, chunk.block_ids, chunk.start, chunk.end)
            data = b"".join(read[piece.offset : piece.offset + piece.length] for piece in runs)
            for piece in to.info.layout.runs(tensor, block_ids, chunk.start, chunk.end):
                written[piece.offset : piece.offset + piece.length], data = data[: piece.length], data[piece.length :]
