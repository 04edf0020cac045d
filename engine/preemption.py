"""Preempt running prompts and restore them: from copies in the swap area, else by recomputing from token ids.

running --preempt--> copies, or only token ids if the area is full --restore, or start--> running
"""

from array import array
from collections.abc import Iterable

from devices.liveness import in_a_line
from engine.kv.blocks import BlockPool
from engine.kv.swap import SavedBlocks, SwapArea
from engine.prefix import BlockName
from engine.prompt import Prompt
from engine.sequence import Sequence
from telemetry.logs import EventLogger

_log = EventLogger("engine")


def preempt(prompt: Prompt, blocks: BlockPool, swap: SwapArea, block_size: int) -> None:
    """Free the prompt's blocks, copying the computed ones if there is room for all; count a swap or a rebuild."""
    interrupts = prompt.has_outputs
    tables = {sequence: _computed_blocks(sequence, block_size) for sequence in prompt.holders}
    slots = None if prompt.state.probe else _save(prompt, tables, swap)
    if not slots:
        prompt.drop(blocks)
        prompt.num_rebuilds += interrupts
        return
    for sequence, table in tables.items():
        sequence.swap_out(blocks, SavedBlocks(swap, [slots[block_id] for block_id in table]))
    swap.release(list(slots.values()))
    prompt.num_swaps += interrupts


def due(running: Iterable[Prompt], after: int) -> list[Prompt]:
    """Return the prompts that the failpoint preempts now, youngest first: those with `after` outputs, each once.

    A pending output counts: the prompt is preempted once it has been collected.
    """
    ready = [prompt for prompt in running if not prompt.hold and prompt.stem is None and not prompt.num_interruptions]
    counts = {prompt: min((one.num_outputs + one.num_awaited for one in prompt.live), default=0) for prompt in ready}
    ready = [prompt for prompt in ready if counts[prompt] >= after]
    return sorted(ready, key=lambda prompt: prompt.age, reverse=True)


def restore(prompt: Prompt, blocks: BlockPool, swap: SwapArea, block_size: int) -> bool:
    """Allocate blocks for a swapped-out prompt and load its KV. Raises NoCapacity, with nothing changed.

    Blocks still in the prefix cache are reused. Returns False if the copies cannot be read: the prompt is then dropped
    to its token ids.
    """
    sequences = prompt.holders
    slots = list(dict.fromkeys(slot for sequence in sequences for slot in sequence.saved_slots))
    num_blocks = max(len(slots), prompt.num_own_blocks(block_size))
    taken, num_held = blocks.take(num_blocks, prompt.prefix)
    by_slot = dict(zip(slots, taken, strict=False))
    try:
        swap.load(slots[num_held:], [by_slot[slot] for slot in slots[num_held:]])
    except Exception as error:  # noqa: BLE001 - any error of the copy: the prompt is rebuilt from its token ids
        _warn("swap_in_failed", prompt, error)
        blocks.release(taken)
        prompt.drop(blocks)
        return False
    given: set[int] = set(taken[len(slots) :])
    for sequence in sequences:
        table = [by_slot[slot] for slot in sequence.saved_slots]
        blocks.retain([block_id for block_id in table if block_id in given])
        given.update(table)
        sequence.swap_in(table, blocks)
    if prompt.stem is not None:
        prompt.stem.block_ids.extend(taken[len(slots) :])
    return True


def _computed_blocks(sequence: Sequence, block_size: int) -> "array[int]":
    return sequence.block_ids[: -(-sequence.num_computed // block_size)]


def _save(prompt: Prompt, tables: dict[Sequence, "array[int]"], swap: SwapArea) -> dict[int, int] | None:
    names: dict[int, BlockName | None] = {}
    for sequence, table in tables.items():
        for index, block_id in enumerate(table):
            named = index < sequence.num_named
            names[block_id] = sequence.chain.name(index, sequence.token_ids) if named else names.get(block_id)
    try:
        return swap.save(names)
    except Exception as error:  # noqa: BLE001 - any error of the copy: the prompt is rebuilt from its token ids
        _warn("swap_out_failed", prompt, error)
        return None


def _warn(event: str, prompt: Prompt, error: Exception) -> None:
    state = prompt.state
    _log.warning(
        event, prompt_id=state.prompt_id, request_id=state.request_id, next="recomputed", error=in_a_line(error)
    )
