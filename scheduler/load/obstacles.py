"""Why a pair of instances cannot take a prompt now, in words with the values. Pure."""

from collections.abc import Iterator

from scheduler.load.loads import InstanceLoad, LinkShare, PromptFacts
from wire.held_kv_limit import hold_limit


def obstacles(start: InstanceLoad, decode: InstanceLoad, prompt: PromptFacts, share: LinkShare) -> Iterator[str]:
    """Yield what keeps the prompt from this pair now; nothing where it can start. `start` may be `decode`."""
    yield from of_start(start, prompt)
    if start is decode:
        yield from _of_seats(decode, prompt)
    else:
        yield from _of_link(start, decode, share)
        yield from of_end(decode, prompt)


def of_end(decode: InstanceLoad, prompt: PromptFacts) -> Iterator[str]:
    """Yield what keeps the prompt from ending there, wherever it starts."""
    yield from _of_silence(decode)
    yield from _of_blocks(decode, prompt)
    if decode.waiting > 0:
        yield f"{decode.name} has {decode.waiting} prompts that wait for KV blocks"
    yield from _of_seats(decode, prompt)


def of_start(start: InstanceLoad, prompt: PromptFacts) -> Iterator[str]:
    """Yield what keeps the prompt from starting there, wherever it ends."""
    yield from _of_silence(start)
    if not start.can_start:
        outstanding, limit = start.outstanding_tokens, start.prefill_chunk_size
        yield f"{start.name} has {outstanding} prompt tokens to compute (limit {limit}, its next step)"
    held, limit = start.held_tokens, hold_limit(start.pool_tokens)
    if held >= limit:
        yield f"{start.name} holds {held} tokens of KV for its receivers (limit {limit})"
    yield from _of_blocks(start, prompt)


def _of_silence(load: InstanceLoad) -> Iterator[str]:
    if load.is_suspect:
        yield f"{load.name} is suspect: it is silent"


def _of_link(start: InstanceLoad, decode: InstanceLoad, share: LinkShare) -> Iterator[str]:
    held = start.held_for.get(decode.index)
    if held is None:
        return
    name = f"the link from {start.name} to {decode.name}"
    if held.tokens >= share.tokens:
        yield f"{name} has {held.tokens} tokens of KV to send (limit {share.tokens})"
    if held.sequences >= share.sequences:
        yield f"{name} has {held.sequences} sequences to send (limit {share.sequences})"


def _of_seats(decode: InstanceLoad, prompt: PromptFacts) -> Iterator[str]:
    if decode.sequences + prompt.num_sequences > decode.max_num_seqs:
        yield (
            f"{decode.name} has {decode.sequences} sequences and {prompt.num_sequences} would come "
            f"(limit {decode.max_num_seqs})"
        )


def _of_blocks(load: InstanceLoad, prompt: PromptFacts) -> Iterator[str]:
    needed = load.blocks_for(prompt.num_tokens) - load.blocks_shared(prompt)
    if needed > load.blocks_free:
        free = max(0, load.blocks_free)
        yield f"{load.name} has {free} of {load.blocks_total} KV blocks free, {needed} are needed"
