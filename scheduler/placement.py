"""Choose instances for one prompt. Pure: no I/O, no clock, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from wire.errors import NeverFits, Unavailable
from wire.types import Role


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """One living instance as placement sees it: its last snapshot less what we have given it since.

    `outstanding_tokens` are prompt tokens given and not yet prefilled; `sequences` run, wait or are booked there;
    `waiting` of them have been dropped from a full pool, or wait for their prefill there.
    """

    index: int
    role: Role
    outstanding_tokens: int
    prefill_chunk_size: int
    blocks_total: int
    blocks_free: int
    block_size: int
    sequences: int
    waiting: int
    max_num_seqs: int

    @property
    def can_start(self) -> bool:
        """Whether a prompt given now is in the next step: the running one takes all that is outstanding."""
        return self.outstanding_tokens <= self.prefill_chunk_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of this instance hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What placement needs to know of a prompt. `avoid` are pairs (prefill index, decode index) that failed it."""

    num_tokens: int
    max_tokens: int
    num_sequences: int = 1
    avoid: frozenset[tuple[int | None, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """How to serve one prompt; instances by table index. `prefill` is None on the local path."""

    path: str
    prefill: int | None
    decode: int
    reason: str

    @property
    def pair(self) -> tuple[int | None, int]:
        """The instances, as `PromptFacts.avoid` names them."""
        return (self.prefill, self.decode)


def has_path(roles: Sequence[Role]) -> bool:
    """Return whether instances of these roles can serve a request together."""
    return Role.COMBINED in roles or (Role.PREFILL in roles and Role.DECODE in roles)


def place(loads: Sequence[InstanceLoad], prompt: PromptFacts) -> Plan | None:
    """Return the plan for now, or None when the prompt has to wait for room.

    Starts on the prefill (or combined) instance with the least outstanding tokens; decodes where the whole sequence
    has room, the fewest sequences first; ties go to the lower index. Raises Unavailable without a path and NeverFits.
    """
    pairs = _pairs(loads, prompt)
    if not pairs:
        raise Unavailable("no prefill and decode instance, and no combined one, is connected")
    _check_fits(pairs, prompt)
    for start, decode in pairs:
        if _can_serve(start, decode, prompt):
            return _plan(start, decode, prompt)
    return None


def _pairs(loads: Sequence[InstanceLoad], prompt: PromptFacts) -> list[tuple[InstanceLoad, InstanceLoad]]:
    starts = sorted(
        (load for load in loads if load.role is not Role.DECODE), key=lambda load: (load.outstanding_tokens, load.index)
    )
    decodes = sorted(
        (load for load in loads if load.role is Role.DECODE),
        key=lambda load: (not _has_whole_room(load, prompt), load.sequences, load.index),
    )
    pairs = []
    for start in starts:
        ends = [start] if start.role is Role.COMBINED else decodes
        pairs += [(start, end) for end in ends if _key(start, end) not in prompt.avoid]
    return pairs


def _check_fits(pairs: Sequence[tuple[InstanceLoad, InstanceLoad]], prompt: PromptFacts) -> None:
    for start, decode in pairs:
        if all(load.blocks_for(prompt.num_tokens) <= load.blocks_total for load in (start, decode)):
            return
    smallest = [min(start.blocks_total * start.block_size, end.blocks_total * end.block_size) for start, end in pairs]
    raise NeverFits(
        f"the prompt has {prompt.num_tokens} tokens; the KV pools of the instances hold {max(smallest)} at most"
    )


def _can_serve(start: InstanceLoad, decode: InstanceLoad, prompt: PromptFacts) -> bool:
    sequences_fit = decode.sequences + prompt.num_sequences <= decode.max_num_seqs or decode.sequences == 0
    prompt_fits = all(load.blocks_for(prompt.num_tokens) <= load.blocks_free for load in (start, decode))
    pool_is_overrun = start is not decode and decode.waiting > 0
    return start.can_start and sequences_fit and prompt_fits and not pool_is_overrun


def _has_whole_room(load: InstanceLoad, prompt: PromptFacts) -> bool:
    own_blocks = prompt.num_sequences * load.blocks_for(prompt.max_tokens)
    return load.blocks_for(prompt.num_tokens) + own_blocks <= load.blocks_free


def _plan(start: InstanceLoad, decode: InstanceLoad, prompt: PromptFacts) -> Plan:
    room = "room for the whole sequence" if _has_whole_room(decode, prompt) else "room for the prompt"
    if start is decode:
        return Plan("local", None, decode.index, f"combined instance {decode.index}: {room}")
    reason = (
        f"prefill {start.index}: {start.outstanding_tokens} tokens outstanding; "
        f"decode {decode.index}: {decode.sequences} sequences, {room}"
    )
    return Plan("handoff", start.index, decode.index, reason)


def _key(start: InstanceLoad, decode: InstanceLoad) -> tuple[int | None, int]:
    return (None if start is decode else start.index, decode.index)
