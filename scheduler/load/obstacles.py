"""Explain, with the values, why a pair of instances cannot take a prompt now. Pure."""

from collections.abc import Iterator, Sequence

from scheduler.load.loads import InstanceLoad, LinkShare, PromptFacts
from wire.shared_limits import hold_limit

_MAX_SHOWN = 4


def obstacles(start: InstanceLoad, decode: InstanceLoad, prompt: PromptFacts, share: LinkShare) -> Iterator[str]:
    """Yield the reasons why this pair cannot take the prompt now; none if it can. `start` may be `decode`."""
    yield from of_start(start, prompt)
    yield from between_ends(start, decode, prompt, share)
    if start is not decode:
        yield from of_end(decode, prompt)


def between_ends(start: InstanceLoad, decode: InstanceLoad, prompt: PromptFacts, share: LinkShare) -> Iterator[str]:
    """Yield the reasons that depend on both instances; `of_start` and `of_end` have those of one instance alone."""
    if start is decode:
        yield from _of_slots(decode, prompt)
    else:
        yield from _of_link(start, decode, share)


def of_end(decode: InstanceLoad, prompt: PromptFacts) -> Iterator[str]:
    """Yield the reasons why the prompt cannot be decoded on `decode`, wherever it is prefilled."""
    yield from _of_silence(decode)
    yield from _of_blocks(decode, prompt)
    if decode.waiting > 0:
        yield f"{decode.name} has {_counted(decode.waiting, 'prompt')} waiting for KV blocks"
    yield from _of_slots(decode, prompt)


def of_start(start: InstanceLoad, prompt: PromptFacts) -> Iterator[str]:
    """Yield the reasons why the prompt cannot be prefilled on `start`, wherever it is decoded."""
    yield from _of_silence(start)
    if not start.can_start:
        outstanding, limit = start.outstanding_tokens, start.prefill_chunk_size
        yield f"{start.name} has {outstanding} prompt tokens to compute (limit {limit}, its next step)"
    held, limit = start.held_tokens, hold_limit(start.pool_tokens)
    if held >= limit:
        yield f"{start.name} holds {held} tokens of KV for its receivers (limit {limit})"
    yield from _of_blocks(start, prompt)


def first_reasons(reasons: Sequence[str]) -> str:
    """Return the first reasons, and how many more there are: a large cluster has a thousand pairs."""
    more = f"; and {len(reasons) - _MAX_SHOWN} more" if len(reasons) > _MAX_SHOWN else ""
    return "; ".join(reasons[:_MAX_SHOWN]) + more


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _of_silence(load: InstanceLoad) -> Iterator[str]:
    if load.is_suspect:
        yield f"{load.name} has sent no message for a while"


def _of_link(start: InstanceLoad, decode: InstanceLoad, share: LinkShare) -> Iterator[str]:
    held = start.held_for.get(decode.index)
    if held is None:
        return
    name = f"the link from {start.name} to {decode.name}"
    if held.tokens >= share.tokens:
        yield f"{name} has {held.tokens} tokens of KV to send (limit {share.tokens})"
    if held.sequences >= share.sequences:
        yield f"{name} has {_counted(held.sequences, 'sequence')} to send (limit {share.sequences})"


def _of_slots(decode: InstanceLoad, prompt: PromptFacts) -> Iterator[str]:
    if decode.sequences + prompt.num_sequences > decode.max_num_seqs:
        yield (
            f"{decode.name} has {_counted(decode.sequences, 'sequence')} and {prompt.num_sequences} would be added "
            f"(limit {decode.max_num_seqs})"
        )


def _of_blocks(load: InstanceLoad, prompt: PromptFacts) -> Iterator[str]:
    needed = load.blocks_for(prompt.num_tokens) - load.blocks_shared(prompt)
    if needed > load.blocks_free:
        free = max(0, load.blocks_free)
        yield f"{load.name} has {free} of {load.blocks_total} KV blocks free, but {needed} are needed"
