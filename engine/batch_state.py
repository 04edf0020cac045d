"""The waiting, running and held prompts of an engine, and the selection of the next step.

waiting --start--> running --(hold)--> held --> gone
   ^                  |
   +----preemption----+      youngest first; never the oldest, never a held prompt (preemption.py)
"""

from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from engine.ahead import may_continue
from engine.batcher import BatchLimits, plan_step
from engine.kv.blocks import BlockPool
from engine.kv.swap import SwapArea
from engine.preemption import due, preempt, restore
from engine.prefix import BlockName
from engine.prompt import Prompt, ScheduledTokens
from engine.requirements import blocks_needed
from engine.sequence import Sequence
from engine.step import Model
from engine.whole_images import whole_count
from processes.failpoints import PREEMPT, process_failpoints
from telemetry.logs import EventLogger
from wire.errors import InternalError, NoCapacity

_log = EventLogger("engine")
_TURN = attrgetter("turn")


@dataclass(slots=True)
class Selection:
    """The schedule of the next step, the prompts preempted for it, and the prompts that failed during selection.

    A selection that `is_behind` a step not collected yet preempts no prompt; it `is_short` if it would have had to.
    """

    schedule: list[ScheduledTokens] = field(default_factory=list)
    interrupted: list[Prompt] = field(default_factory=list)
    failed: list[tuple[Prompt, Exception]] = field(default_factory=list)
    is_behind: bool = False
    is_short: bool = False


class BatchState:
    """Mutable, owned by the core: every prompt of the engine is either waiting, running or held."""

    def __init__(self, model: Model, blocks: BlockPool, swap: SwapArea, limits: BatchLimits) -> None:
        self._model = model
        self._blocks = blocks
        self.swap = swap
        self.limits = limits
        self._block_size = model.info.layout.block_size
        self.waiting: deque[Prompt] = deque()
        self.running: dict[str, Prompt] = {}
        self.held: dict[str, Prompt] = {}
        self.preemptions = 0
        self._preempt_after = process_failpoints().preempt_after

    def prompts(self) -> list[Prompt]:
        """Return every prompt. Any thread may call this; a prompt that changes state may be missing or appear twice."""
        return [*self.waiting.copy(), *self.running.copy().values(), *self.held.copy().values()]

    def find(self, prompt_id: str) -> Prompt | None:
        """Return the prompt with that id, in whichever state."""
        prompt = self.running.get(prompt_id) or self.held.get(prompt_id)
        return prompt or next((waits for waits in self.waiting if waits.state.prompt_id == prompt_id), None)

    def queue(self, prompt: Prompt) -> None:
        """Queue a new prompt last, but a probe first, so that a long prompt does not delay the health check."""
        if prompt.state.probe:
            self.waiting.appendleft(prompt)
        else:
            self.waiting.append(prompt)

    @property
    def decoding(self) -> list[Prompt]:
        """The prompts whose sequences get a token in each step. Safe from any thread."""
        return [prompt for prompt in self.running.copy().values() if prompt.stem is None]

    def runs(self, prompt: Prompt) -> bool:
        """Return whether the prompt is running: not waiting, held or removed."""
        return self.running.get(prompt.state.prompt_id) is prompt

    def hold(self, prompt: Prompt) -> None:
        """Move a running prompt to the held ones, which compute nothing and keep their blocks."""
        prompt.images = None
        self.held[prompt.state.prompt_id] = self.running.pop(prompt.state.prompt_id)

    def remove(self, prompt: Prompt) -> None:
        """Free the prompt's blocks and remove it. Idempotent."""
        prompt.free(self._blocks)
        self.running.pop(prompt.state.prompt_id, None)
        self.held.pop(prompt.state.prompt_id, None)
        if prompt in self.waiting:
            self.waiting.remove(prompt)

    def has_work(self) -> bool:
        """Return whether `select` would schedule anything: an engine that cannot progress must not spin."""
        if self.waiting and self._may_start(self.waiting[0]):
            return True
        if sum(not prompt.hold for prompt in self.running.values()) > 1:
            return True  # the oldest can take the blocks of the youngest
        free = self._blocks.num_free
        return any(
            scheduled.sequence.blocks_missing(1, self._blocks, self._block_size) <= free
            for prompt in self.running.values()
            for scheduled in prompt.to_schedule()
        )

    def select(self, now: float) -> Selection:
        """Start waiting prompts that fit, plan the step, and reserve the blocks it writes, preempting if needed."""
        selection = Selection()
        self._start_waiting(now, selection)
        if self._preempt_after is not None:
            self._preempt_due(self._preempt_after, selection)
        schedule = self._candidates()
        if self._model.info.rope is not None:
            for scheduled in schedule:
                scheduled.sequence.recount(self._model.info.rope, self._blocks)
        self._share_out(schedule, selection)
        return selection

    def select_behind(self, now: float) -> Selection:
        """As `select`, while a step is not collected yet: schedule nothing if a prompt would have to be preempted."""
        selection = Selection(is_behind=True)
        self._start_waiting(now, selection)
        if self._preempt_after is None or not due(self.running.values(), self._preempt_after):
            longest = self._model.info.max_model_len
            schedule = [scheduled for scheduled in self._candidates() if may_continue(scheduled, longest)]
            self._share_out(schedule, selection)
        if selection.is_short:
            selection.schedule.clear()
        return selection

    def _candidates(self) -> list[ScheduledTokens]:
        """Return the next tokens of all running prompts, in serving order."""
        in_order = sorted(self.running.values(), key=_TURN)
        return [scheduled for prompt in in_order for scheduled in prompt.to_schedule()]

    def _share_out(self, schedule: list[ScheduledTokens], selection: Selection) -> None:
        """Divide the step among the sequences that get blocks; tokens that one sequence cannot use go to the others."""
        unlaunched = wanted = [scheduled.sequence.unlaunched for scheduled in schedule]
        counts = self._planned(schedule, wanted)
        while (got := self._rooms(schedule, counts, selection)) != counts:
            wanted = [room if room < count else want for want, count, room in zip(wanted, counts, got, strict=True)]
            counts = self._planned(schedule, wanted)
        for scheduled, count, left in zip(schedule, counts, unlaunched, strict=True):
            sequence = scheduled.sequence
            if count and sequence.has_room(count):  # else its prompt was preempted after its turn
                scheduled.start = sequence.num_computed + sequence.num_pending
                scheduled.count, scheduled.reaches_end = count, count == left
                selection.schedule.append(scheduled)

    def _planned(self, schedule: list[ScheduledTokens], wanted: list[int]) -> list[int]:
        """Return how many tokens each sequence gets by the limits; one image may exceed them rather than be cut."""
        counts, exceeds = plan_step(wanted, self.limits), False
        for i, scheduled in enumerate(schedule):
            if scheduled.prompt.spans and scheduled.sequence is scheduled.prompt.stem:
                whole = whole_count(scheduled.prompt.spans, scheduled.sequence.num_launched, counts[i])
                if whole > counts[i]:
                    whole, exceeds = 0 if exceeds else whole, True
                counts[i] = whole
        return counts

    def _rooms(self, schedule: list[ScheduledTokens], counts: list[int], selection: Selection) -> list[int]:
        """Return how many of each sequence's tokens have blocks now; most sequences have room in their last block."""
        return [
            count
            if scheduled.sequence.has_room(count)
            else self._room_for(scheduled.prompt, scheduled.sequence, count, selection)
            for scheduled, count in zip(schedule, counts, strict=True)
        ]

    def _room_for(self, prompt: Prompt, sequence: Sequence, count: int, selection: Selection) -> int:
        """Return how many of `count` tokens have blocks now; 0 if the prompt was preempted or failed meanwhile."""
        if not count or not self.runs(prompt):
            return 0
        try:
            return self._make_room(prompt, sequence, count, selection)
        except Exception as error:  # noqa: BLE001 - a copy that fails ends this prompt only, and is reported
            self.remove(prompt)
            selection.failed.append((prompt, error))
            return 0

    def _make_room(self, prompt: Prompt, sequence: Sequence, count: int, selection: Selection) -> int:
        """Return how many of `count` tokens have blocks: all of them, 1 if only one fits, or 0."""
        while count:
            try:
                sequence.make_room(count, self._blocks, self._model, probe=prompt.state.probe)
                return count
            except NoCapacity:
                if selection.is_behind:
                    selection.is_short = True
                    return 0
                if not self._preempt_youngest(selection):
                    count = int(count > 1)
                elif not self.runs(prompt):
                    return 0
        return 0

    def _preempt_youngest(self, selection: Selection) -> bool:
        """Preempt the youngest running prompt; return False if fewer than two can be preempted."""
        droppable = [prompt for prompt in self.running.values() if not prompt.hold]
        if len(droppable) < 2:
            return False
        self._preempt(max(droppable, key=lambda prompt: prompt.age), selection)
        return True

    def _preempt(self, prompt: Prompt, selection: Selection) -> None:
        known = prompt.num_interruptions
        preempt(prompt, self._blocks, self.swap, self._block_size)
        del self.running[prompt.state.prompt_id]
        self.preemptions += 1
        if not (prompt.is_swapped_out or prompt.can_be_rebuilt):
            error = NoCapacity("the prompt's KV was dropped, and this instance lacks its images")
            selection.failed.append((prompt, error))
            return
        self.waiting.appendleft(prompt)
        if prompt.num_interruptions > known:
            selection.interrupted.append(prompt)

    def _preempt_due(self, after: int, selection: Selection) -> None:
        """Preempt each prompt that the failpoint selects, as a full pool would preempt the youngest."""
        for prompt in due(self.running.values(), after):
            ids = {"prompt_id": prompt.state.prompt_id, "request_id": prompt.state.request_id}
            _log.warning("failpoint", point=PREEMPT, after=after, **ids)
            self._preempt(prompt, selection)

    def _start_waiting(self, now: float, selection: Selection) -> None:
        while self.waiting and self._may_start(self.waiting[0]):
            prompt = self.waiting[0]
            try:
                self._start(prompt, now)
            except NoCapacity:
                return  # another thread has taken the blocks
            except Exception as error:  # noqa: BLE001 - ends this prompt only, and is reported
                self.remove(prompt)
                selection.failed.append((prompt, error))
                continue
            self.running[prompt.state.prompt_id] = self.waiting.popleft()

    def _start(self, prompt: Prompt, now: float) -> None:
        if prompt.is_swapped_out and restore(prompt, self._blocks, self.swap, self._block_size):
            return
        if not prompt.can_be_rebuilt:
            raise InternalError("the copy of the prompt's KV cannot be read, and this instance lacks its images")
        prompt.start(self._blocks, self._block_size, now)

    def _may_start(self, prompt: Prompt) -> bool:
        """Return whether the limits allow the prompt's sequences, the next chunk is not full, and the prompt's KV fits.

        A probe also starts if the running prompts fill the next chunk. One free block is reserved for each running
        sequence, so that a new prompt is not preempted at once.
        """
        running = self.running.values()
        backlog = sum(other.unlaunched_tokens for other in running)
        free_seqs = self.limits.max_num_seqs - sum(other.num_seqs for other in running)
        growing = sum(other.num_seqs for other in running if not other.hold)
        if free_seqs < prompt.num_seqs or (backlog >= self.limits.prefill_chunk_size and not prompt.state.probe):
            return False
        needed, found = self._blocks_to_start(prompt)
        missing = needed + growing - self._blocks.num_free
        return missing <= 0 or missing <= self._blocks.num_shareable(found)

    def _blocks_to_start(self, prompt: Prompt) -> tuple[int, list[BlockName]]:
        """Return how many blocks the prompt needs, and the names of those it may share with others until it ends."""
        length, rope = len(prompt.state.token_ids), self._model.info.rope
        counts = [sequence.num_outputs for sequence in prompt.live] or [0] * prompt.num_seqs
        outputs = [] if prompt.hold else counts
        needed = blocks_needed(length, outputs, self._block_size, rope)
        drops = rope is not None and any(rope.drops_prompt(length, length + count) for count in outputs)
        return needed, [] if drops else prompt.prefix
