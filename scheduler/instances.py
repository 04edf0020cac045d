"""One session with one instance: sends commands, and routes events to the prompts that wait for them.

path --post--> outbox --sender--> session ==> instance
prompt <-on_*- reader <---------- session <== instance
               watch: heartbeat out and silence checked, once a second

living --suspect_s without a message--> suspect (no new work, streams kept) --silence_s--> lost
   ^------------------a message-------------|
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Container, Sequence

from scheduler.limits import ControlLimits
from scheduler.load.in_flight_ledger import InFlightLedger
from scheduler.load.loads import InstanceLoad
from scheduler.mailbox import Mailbox
from scheduler.pending_answers import PendingAnswers
from scheduler.prompt_on_instance import PromptOnInstance, PromptStep, SessionLost
from scheduler.starvation import Slowness
from telemetry.logs import EventLogger
from wire.connection import Session
from wire.description import InstanceDescription
from wire.errors import InstanceLost, InternalError, PdserveError
from wire.load import LoadSnapshot
from wire.messages import (
    Adopted,
    Answer,
    Cancel,
    Claimed,
    Command,
    Event,
    Failed,
    HandedOff,
    Heartbeat,
    LinkMeasured,
    Pooled,
    PrefillBegun,
    PrefillHeld,
    Refused,
    Reserved,
    RoleHeld,
    SessionOpen,
    Step,
    TableRead,
)
from wire.shared_limits import progress_limit
from wire.step_cost import StepCost
from wire.types import Role

_log = EventLogger("instances")

_IDLE_POLL_S = 0.05


class _Found(InstanceLost):
    """A loss detected by this side, whose message is safe for clients; a session's own errors contain addresses."""


class Instance:
    """Owner of one open session: its outbox, the prompts attached to it, the last load and the last event's time."""

    def __init__(
        self,
        index: int,
        name: str,
        description: InstanceDescription,
        role: Role,
        session: Session,
        load: LoadSnapshot,
        limits: ControlLimits,
        load_changed: Callable[[], None],
        suspicion_changed: Callable[[], None],
        role_held: Callable[[RoleHeld], None],
    ) -> None:
        """Calls `load_changed` when its load changes.

        `suspicion_changed` is called when it becomes suspect, recovers, or is lost. `role_held` gets the answer to each
        SetRole.
        """
        self.index = index
        self.name = name
        self.description = description
        self.role = role
        self.serves_without: Role | None = None  # the role that is gone, so that it serves prompts alone
        self.address = f"{description.host}:{description.port}"
        self.table_digest = description.table_digest
        self.in_flight = InFlightLedger(load, load_changed, block_size=description.block_size)
        self.link_answers = PendingAnswers[LinkMeasured]()
        self.role_answers = PendingAnswers[RoleHeld]()
        self.claim_answers = PendingAnswers[Claimed]()
        self._session = session
        self._limits = limits
        self._outbox = Mailbox[Command]()
        self._prompts: dict[str, PromptOnInstance] = {}
        self._suspicion_changed = suspicion_changed
        self._role_held = role_held
        self._lost: InstanceLost | None = None
        self.is_living = True  # while the session is open; read for each instance at each placement
        self._slowness = Slowness()
        self._last_message_at = self._run_time()
        self._sending_since: float | None = None
        self._stepped_at = float("-inf")
        self.is_suspect = False
        self._placement_load: InstanceLoad | None = None
        self._placed_version = -1

    def __str__(self) -> str:
        """Return its name for clients, without the address."""
        return self.name

    @property
    def load(self) -> LoadSnapshot:
        """The instance's last reported load."""
        return self.in_flight.load

    def placement_load(self, no_transport_to: Container[int]) -> InstanceLoad:
        """Return the load for placement: computed only after a change, because a large cluster has many instances."""
        load, version = self._placement_load, self.in_flight.version
        if (
            load is None
            or version != self._placed_version
            or load.role is not self.role
            or load.is_suspect is not self.is_suspect
        ):
            load, self._placed_version = self.new_placement_load(), version
            self._placement_load = load
        load.no_transport_to = no_transport_to
        return load

    def new_placement_load(self) -> InstanceLoad:
        """Compute the load for placement."""
        description, ledger = self.description, self.in_flight
        return InstanceLoad(
            index=self.index,
            name=self.name,
            role=self.role,
            outstanding_tokens=ledger.outstanding_tokens,
            encoding_tokens=ledger.encoding_tokens,
            prefill_chunk_size=description.prefill_chunk_size,
            blocks_total=ledger.load.blocks_total,
            blocks_free=ledger.blocks_free,
            block_size=description.block_size,
            sequences=ledger.sequences,
            waiting=ledger.load.waiting,
            max_num_seqs=description.max_num_seqs,
            held_for=ledger.held_for,
            is_suspect=self.is_suspect,
            path=description.path,
            streams=ledger.streams,
            arriving=ledger.arriving,
            cost=StepCost(ledger.load.step_base_s, ledger.load.step_sequence_s, ledger.load.step_token_s),
            gap_limit_s=ledger.load.gap_limit_s,
        )

    @property
    def slowness(self) -> float:
        """The factor by which starvation slows the instance down, by its own report; 1 or more."""
        return self._slowness.factor

    @property
    def orphan_s(self) -> float:
        """How long it keeps a stream that no client reads."""
        return self._limits.orphan_s

    def starved_s(self) -> float:
        """Return for how many seconds its machine did not let it run, according to its last message."""
        return self.load.starved_s

    def stepped_within(self, seconds: float) -> bool:
        """Whether it reported a new step in the last `seconds`."""
        return asyncio.get_running_loop().time() - self._stepped_at <= seconds

    def is_short_of_blocks(self) -> bool:
        """Whether prompts wait there for KV blocks."""
        return self.load.waiting > 0

    def attach(self, on_instance: PromptOnInstance) -> None:
        """Route a prompt's events to its owner."""
        self._prompts[on_instance.prompt_id] = on_instance
        if self._lost is not None:
            on_instance.on_event(SessionLost(self._lost))

    def detach(self, on_instance: PromptOnInstance) -> None:
        """Route no more events to the owner; cancel the prompt on the instance unless it has ended."""
        on_instance.cancel()
        if self._prompts.get(on_instance.prompt_id) is on_instance:  # else the stream was adopted again, by this side
            del self._prompts[on_instance.prompt_id]

    async def wait_idle(self, timeout_s: float) -> int:
        """Return 0 once no prompt is on the instance or in transit; after `timeout_s`, the number of those left."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_living and self._num_prompts:  # noqa: ASYNC110 - prompts and bookings leave in many ways
                    await asyncio.sleep(_IDLE_POLL_S)
        except TimeoutError:
            return self._num_prompts
        return 0

    @property
    def _num_prompts(self) -> int:
        return len(self._prompts.keys() | self.in_flight.prompt_ids)

    def post(self, command: Command) -> None:
        """Queue a command without waiting."""
        if self._lost is None:
            self._outbox.put(command)

    async def run(self, events: AsyncIterator[Event]) -> None:
        """Serve the session until it is over, then notify every prompt. Raises InstanceLost."""
        reason = InstanceLost(f"{self} was released: the scheduler is closing its session")
        tasks = [asyncio.create_task(coroutine) for coroutine in (self._read(events), self._send(), self._watch())]
        try:  # not a TaskGroup: Python 3.11's and 3.12's drop a cancellation that arrives while they finish
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = self._end_reason([task for task in tasks if task in ended])
            reason = InstanceLost(f"{self} was lost: {error if isinstance(error, _Found) else 'its connection broke'}")
            raise InstanceLost(f"{self.address}: {error}") from error
        finally:
            try:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._end(reason)

    async def _read(self, events: AsyncIterator[Event]) -> None:
        async for event in events:
            self._last_message_at = self._run_time()
            if self.is_suspect:
                self._set_suspect(is_suspect=False)
            self._handle_event(event)
        raise _Found("it ended the session")

    def _handle_event(self, event: Event) -> None:
        match event:
            case Step(load=load) as step:
                self._update(load)
                for part in _split(step):
                    on_instance = self._prompts.get(part.prompt_id)
                    if on_instance is not None:
                        on_instance.owner.on_step(on_instance, part)
            case Heartbeat(load=beat):
                self._update(beat)
            case Refused(load=refused_load):
                self._update(refused_load)
                self._pass_to_prompt(event)
            case Adopted(prompt=prompt) if event.prompt_id not in self._prompts:  # too late: the client may try again
                epoch = 0 if prompt.stream is None else prompt.stream.owner_epoch
                unwanted = Cancel(prompt.prompt_id, owner_epoch=epoch)
                asyncio.get_running_loop().call_later(self.orphan_s, self.post, unwanted)
            case Reserved() | Adopted() | PrefillHeld() | PrefillBegun() | HandedOff() | Pooled() | Failed():
                self._pass_to_prompt(event)
            case Claimed():
                self.claim_answers.deliver(event.claim_id, event)
            case LinkMeasured():
                self.link_answers.deliver(event.peer_id, event)
            case RoleHeld():
                self._role_held(event)
                self.role_answers.deliver(str(event.answers), event)
            case TableRead(digest=digest):
                self.table_digest = digest
            case SessionOpen():
                _log.warning("second_session_open", instance=self.address)

    def _update(self, load: LoadSnapshot | None) -> None:
        if load is not None:
            now = asyncio.get_running_loop().time()
            self._slowness.measure(now, load.starved_s)
            if load.steps > self.load.steps:
                self._stepped_at = now
            self.in_flight.update(load)
            check_progress(load, self._limits)

    def _pass_to_prompt(self, event: Answer) -> None:
        on_instance = self._prompts.get(event.prompt_id)
        if on_instance is not None:
            on_instance.on_event(event)

    async def _send(self) -> None:
        while True:
            commands = await self._outbox.take()
            self._sending_since = self._run_time()  # checked by _watch: a timer for each message is costly
            await self._session.send(*commands)
            self._sending_since = None

    async def _watch(self) -> None:
        loop, interval = asyncio.get_running_loop(), self._limits.heartbeat_s
        while True:
            due = loop.time() + interval
            await asyncio.sleep(interval)
            self.post(Heartbeat())
            if loop.time() - due < interval:  # else our own loop was blocked, and messages are still unread
                self._check_peer()

    def _check_peer(self) -> None:
        """Suspect or lose an instance that accepts nothing or is silent; only time in which we could run counts."""
        limits, now = self._limits, self._run_time()
        if self._sending_since is not None and now - self._sending_since > limits.send_s:
            raise _Found(f"it accepted no command for {limits.send_s:g} s")
        silent_s = now - self._last_message_at
        limit_s = min(limits.silence_s * self.slowness, max(limits.silence_s, limits.silence_most_s))
        if silent_s > limit_s:
            raise _Found(f"no message for {silent_s:.1f} s (limit {limit_s:.3g} s)")
        if not self.is_suspect and silent_s > min(limits.suspect_s * self.slowness, limit_s / 2):
            self._set_suspect(is_suspect=True)

    def _set_suspect(self, *, is_suspect: bool) -> None:
        self.is_suspect = is_suspect
        self._suspicion_changed()

    def _run_time(self) -> float:
        return asyncio.get_running_loop().time() - self._limits.starved()

    def _end_reason(self, ended: Sequence[asyncio.Task[None]]) -> PdserveError:
        errors = [None if task.cancelled() else task.exception() for task in ended]
        for error in errors:
            if isinstance(error, PdserveError):
                return error
        _log.error("session_failed", errors[0], instance=self.address)
        return InternalError(f"internal error: {errors[0]!r}")

    def _end(self, error: InstanceLost) -> None:
        self._lost, self.is_living = error, False
        for on_instance in self._prompts.values():
            on_instance.on_event(SessionLost(error))
        self.link_answers.end(error)
        self.role_answers.end(error)
        self.claim_answers.end(error)
        self._suspicion_changed()


def check_progress(load: LoadSnapshot, limits: ControlLimits) -> None:
    """Raise InstanceLost if the engine that reports `load` is stuck."""
    limit_s = progress_limit(load.slowest_turn_s, least_s=limits.progress_s)
    if load.progress_age_s > limit_s:
        raise _Found(f"its engine made no progress for {load.progress_age_s:.1f} s (limit {limit_s:.3g} s)")


def _split(step: Step) -> Collection[PromptStep]:
    """Split a Step into one part per prompt, in token order."""
    parts = {prompt_id: PromptStep(prompt_id, [], times) for prompt_id, times in step.times}
    for token in step.tokens:
        part = parts.get(token.prompt_id)
        if part is None:
            part = parts[token.prompt_id] = PromptStep(token.prompt_id, [])
        part.tokens.append(token)
    for scored in step.prompt_logprobs:
        parts.setdefault(scored.prompt_id, PromptStep(scored.prompt_id, [])).prompt_logprobs += (scored,)
    for prompt_id, ids in step.prompt_ids:
        parts.setdefault(prompt_id, PromptStep(prompt_id, [])).prompt_ids = ids
    return parts.values()
