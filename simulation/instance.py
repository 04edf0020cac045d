"""An instance whose tokens are computed by arithmetic and whose steps take a given time: no threads, model or KV bytes.

P, D and the transfer between them run on the event loop. The instance follows the protocol of wire/messages.py, batches
and counts blocks as a real one does, and can be set to refuse, fail or get stuck. Its only clock is the event loop's,
so it also runs in virtual time.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from engine.step_costs import StepCosts
from scheduler.load.prefixes import Prefixes, chain_of
from simulation.load import load_of
from simulation.prompt import Behaviour, SimulatedPrompt, simulated_vector
from simulation.session import SimulatedSession
from simulation.step import PlannedStep, plan
from wire.claim_table import ClaimTable
from wire.description import InstanceDescription
from wire.errors import Cancelled, HandoffFailed, Incompatible, NeverFits, NoCapacity, to_name
from wire.event_sink import EventSink
from wire.held_role import HeldRole
from wire.kept_stream import adopt_stream, keep_stream
from wire.load import LinkStatus, LoadSnapshot
from wire.messages import (
    Adopt,
    Cancel,
    ClaimRun,
    Command,
    EndClaim,
    Event,
    Failed,
    Generate,
    HandedOff,
    Heartbeat,
    LinkMeasured,
    MeasureLink,
    OpenSession,
    Pooled,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    SessionOpen,
    SetRole,
    Step,
)
from wire.turns import Turns
from wire.types import PromptState, StageTimes, Ticket, TokenOutput


class SimulatedInstance:
    """Owner of the prompts, the blocks and the open sessions. Implements wire.connection.InstanceService."""

    def __init__(self, description: InstanceDescription, peers: "dict[str, SimulatedInstance]") -> None:
        self.description = description
        self._role = HeldRole(description.role)
        self.behaviour = Behaviour()
        self.prompts: dict[str, SimulatedPrompt] = {}
        self.commands: list[Command] = []
        self.steps = 0
        self.peers = peers
        self.sessions: list[SimulatedSession] = []
        self._turns, self._claims = Turns(), ClaimTable()
        self._next_step: asyncio.TimerHandle | None = None
        self._progress_at = 0.0
        self._costs = StepCosts()
        self._prefixes = Prefixes(description.num_blocks * description.block_size)
        self._tokens_sought = self._tokens_found = 0
        peers[description.instance_id] = self

    @property
    def blocks_used(self) -> int:
        """Blocks held by prompts and tickets."""
        return sum(prompt.blocks for prompt in self.prompts.values())

    def describe(self) -> InstanceDescription:
        """Return the instance's description."""
        return self.description

    def open(self, hello: OpenSession) -> SimulatedSession:
        """Accept a session and end an older one of the same scheduler. Raises Incompatible for an older epoch."""
        for before in [one for one in self.sessions if one.hello.scheduler_id == hello.scheduler_id]:
            if hello.epoch < before.hello.epoch:
                raise Incompatible(f"session epoch {hello.epoch} is older than {before.hello.epoch}")
            before.lost()
        opened = SessionOpen(self.description.instance_id, self.description.epoch, self.load())
        session = SimulatedSession(hello, opened, load=self.load, handle=self._handle, ended=self._end_session)
        session.emit(self._role.held)
        self.sessions.append(session)
        return session

    def load(self) -> LoadSnapshot:
        """Return the current load."""
        now = asyncio.get_running_loop().time()
        load = load_of(self.prompts.values(), self.description, self.behaviour, self._costs, now)
        load.progress_age_s = now - self._progress_at if self.behaviour.stuck else 0.0
        load.steps = self.steps
        load.prefix_tokens_sought, load.prefix_tokens_found = self._tokens_sought, self._tokens_found
        return load

    def get_stuck(self) -> None:
        """Stop the engine; the session stays open and reports the age of the last progress."""
        self.behaviour.stuck = True
        self._progress_at = asyncio.get_running_loop().time()

    def get_unstuck(self) -> None:
        """Resume the engine."""
        self.behaviour.stuck = False
        self._schedule_step()

    def die(self) -> None:
        """Simulate kill -9: the instance does nothing more, and its peers no longer find it."""
        self.peers.pop(self.description.instance_id, None)
        self.prompts.clear()
        self.sessions.clear()

    def commit(self, ticket: Ticket, state: PromptState) -> None:
        """Admit a prompt whose KV a peer has sent. Raises HandoffFailed for a ticket that has ended."""
        prompt = self.prompts.get(state.prompt_id)
        if prompt is None or prompt.stage != "reserved" or prompt.ticket != ticket:
            raise HandoffFailed(f"ticket {ticket.ticket_id} has ended on {self.description.instance_id}")
        stream = None if prompt.state is None else prompt.state.stream  # a commit has none
        prompt.state, prompt.stage, prompt.computed = replace(state, stream=stream), "decoding", prompt.num_tokens
        prompt.kept = keep_stream(prompt.state, self.prompts.values())
        prompt.set_outputs(state)
        self._note_prefix(state.token_ids)
        self._schedule_step()

    def abort(self, ticket: Ticket, reason: str) -> None:
        """Fail the prompt whose ticket a peer has aborted."""
        for prompt in tuple(self.prompts.values()):
            if prompt.ticket == ticket and prompt.stage == "reserved":
                self._fail(prompt, HandoffFailed(reason))

    def _handle(self, session: SimulatedSession, command: Command) -> None:
        self.commands.append(command)
        if self.behaviour.ignores_commands:
            return
        match command:
            case Reserve(prompt=state):
                self._reserve(session, state)
            case Prefill(prompt=state, ticket=ticket):
                self._accept(session, state, ticket)
            case Generate(prompt=state):
                self._accept(session, state, None)
            case Cancel():
                self._cancel(session, command)
            case Adopt():
                arriving = [one.state for one in self.prompts.values() if one.state and one.stage == "reserved"]
                if tokens := adopt_stream(session, command, self.prompts.values(), arriving):
                    self._emit(session, Step(tokens, None))
            case ClaimRun() | EndClaim():
                self._claims.handle(session, command, asyncio.get_running_loop().time())
            case MeasureLink(peer_id=peer_id):
                self._emit(session, LinkMeasured(peer_id, *self._measure_link(peer_id)))
            case SetRole():
                self._set_role(session, command)

    def _set_role(self, session: SimulatedSession, command: SetRole) -> None:
        before = self._role.held
        self._emit(session, self._role.take(command))
        for other in self.sessions:
            if other is not session and self._role.held != before:
                self._emit(other, self._role.held)

    def _end_session(self, session: SimulatedSession) -> None:
        """End all work of a session that is gone; its streams end later."""
        self._turns.leave(session)
        if session in self.sessions:
            self.sessions.remove(session)
        orphan_s = session.hello.orphan_s
        self._drop_all(session, keep_streams=orphan_s > 0)
        asyncio.get_running_loop().call_later(orphan_s, self._drop_all, session)

    def _drop_all(self, session: SimulatedSession, *, keep_streams: bool = False) -> None:
        for prompt in [one for one in self.prompts.values() if one.owner is session]:
            if keep_streams and prompt.kept is not None and prompt.kept.has_output:
                continue
            if prompt.stage in ("waiting", "sending"):
                self._abort_ticket(prompt, "the sender's scheduler is gone")
            self._drop(prompt)

    def _reserve(self, session: SimulatedSession, state: PromptState) -> None:
        blocks, total = self._blocks_for(len(state.token_ids)), self.description.num_blocks
        in_turn = state.probe or self._turns.may_take(session, asyncio.get_running_loop().time())
        if self.behaviour.refuse:
            self._refuse(session, state.prompt_id, self.behaviour.refuse.popleft(), "this instance is set to refuse")
        elif blocks > total:
            self._refuse(
                session, state.prompt_id, NeverFits.__name__, f"needed KV blocks: {blocks}, in the pool: {total}"
            )
        elif blocks > total - self.blocks_used or not in_turn:
            free = total - self.blocks_used
            if not state.probe:
                self._turns.wait(session)
            missing = f"needed KV blocks: {blocks}, free: {free}"
            message = missing if in_turn else "another scheduler's prompt waits here"
            self._refuse(session, state.prompt_id, NoCapacity.__name__, message)
        else:
            if not state.probe and self._turns.leave(session):
                asyncio.get_running_loop().call_soon(self._share_load)
            num_tokens = len(state.token_ids)
            ticket = self._ticket(num_tokens)
            self.prompts[state.prompt_id] = SimulatedPrompt(
                session, state.prompt_id, num_tokens, "reserved", blocks, state.probe, state, ticket
            )
            self._emit(session, Reserved(state.prompt_id, ticket, 0.001))

    def _refuse(self, session: SimulatedSession, prompt_id: str, error: str, message: str) -> None:
        self._emit(session, Refused(prompt_id, error, message, self.load()))

    def _ticket(self, num_tokens: int) -> Ticket:
        about, ticket_id = self.description, f"{len(self.commands):032x}"
        return Ticket(ticket_id, about.epoch, about.instance_id, num_tokens, 0, 10.0, ())

    def _accept(self, session: SimulatedSession, state: PromptState, ticket: Ticket | None) -> None:
        num_tokens = len(state.token_ids)
        prompt = SimulatedPrompt(
            session, state.prompt_id, num_tokens, "waiting", self._blocks_for(num_tokens), state.probe, state, ticket,
            kept=None if ticket is not None else keep_stream(state, self.prompts.values()),
        )  # fmt: skip
        prompt.set_outputs(state)
        self.prompts[state.prompt_id] = prompt
        if self.behaviour.caches_prefixes:
            found = min(self._prefixes.tokens_known(chain_of(state.token_ids, "")), num_tokens - 1)
            prompt.computed = found
            self._tokens_sought, self._tokens_found = self._tokens_sought + num_tokens, self._tokens_found + found
        self._schedule_step()

    def _note_prefix(self, token_ids: tuple[int, ...]) -> None:
        if self.behaviour.caches_prefixes:
            self._prefixes.note(chain_of(token_ids, ""))

    def _cancel(self, session: SimulatedSession, command: Cancel) -> None:
        prompt_id, sequence = command.prompt_id, command.sequence
        prompt = self.prompts.get(prompt_id)
        if prompt is None or prompt.owner is not session:
            return
        if prompt.kept is not None and not prompt.kept.is_current(command.owner_epoch):
            return
        if prompt.kept is not None and sequence is None:
            self._drop(prompt)
            return
        if prompt.stage != "decoding":  # its sequences do not exist yet
            self._fail(prompt, Cancelled("cancelled"))
            return
        tokens = tuple(prompt.cancel(sequence))
        self._drop_ended(prompt)
        self._emit(session, Step(tokens, self.load()))

    def _schedule_step(self) -> None:
        if self._next_step is not None or self.behaviour.stuck:
            return
        step = plan(self.prompts.values(), self.description, self.behaviour, self._costs)
        if step.tokens:
            self._next_step = asyncio.get_running_loop().call_later(step.seconds, self._step, step)

    def _step(self, step: PlannedStep) -> None:
        self._next_step = None
        if self.behaviour.stuck:
            return
        self.steps += 1
        if self.behaviour.cost is not None:
            self._costs.measure(step.num_decoding, step.num_chunk_tokens, step.seconds)
        running = [prompt for prompt in step.decoding if self._is_here(prompt)]
        prefilled = self._compute(step.chunks)
        steps: dict[EventSink, tuple[list[TokenOutput], list[tuple[str, StageTimes]]]] = {
            prompt.owner: ([], []) for prompt in (*step.decoding, *(prompt for prompt, _ in step.chunks))
        }
        for prompt in (*running, *prefilled):
            steps[prompt.owner][0].extend(self._sample(prompt))
        for prompt in prefilled:
            if prompt.ticket is None and prompt.state is not None and prompt.state.pooling is None:
                steps[prompt.owner][1].append((prompt.prompt_id, StageTimes(prefill_s=0.01)))
        for prompt in running:
            if not prompt.first_step_sent:
                steps[prompt.owner][1].append((prompt.prompt_id, StageTimes(first_step_s=0.002)))
                prompt.first_step_sent = True
            self._drop_ended(prompt)
        for owner, (tokens, times) in steps.items():
            repeated = tokens if self.behaviour.repeat_tokens else []
            self._emit(owner, Step((*tokens, *repeated), self.load(), tuple(times)))
        self._schedule_step()

    def _compute(self, chunks: Sequence[tuple[SimulatedPrompt, int]]) -> list[SimulatedPrompt]:
        """Compute the chunks of the prompts that are still here; return the prompts that are now complete."""
        whole = []
        for prompt, count in chunks:
            if self._is_here(prompt):
                prompt.computed += count
                if prompt.computed == prompt.num_tokens:
                    whole.append(prompt)
                    assert prompt.state is not None
                    self._note_prefix(prompt.state.token_ids)
        return whole

    def _is_here(self, prompt: SimulatedPrompt) -> bool:
        return self.prompts.get(prompt.prompt_id) is prompt

    def _sample(self, prompt: SimulatedPrompt) -> list[TokenOutput]:
        """Add one token to each open sequence; a prompt just prefilled moves to its next stage."""
        state = prompt.state
        assert state is not None
        if state.pooling is not None:
            self._drop(prompt)
            pooled = Pooled(prompt.prompt_id, simulated_vector(state.token_ids), StageTimes(prefill_s=0.01))
            asyncio.get_running_loop().call_soon(self._emit, prompt.owner, pooled)
            return []
        tokens = list(prompt.sample(self.description.vocab_size))
        if prompt.runs_too_long:
            self._drop(prompt)
        if prompt.stage == "waiting":
            self._on_prefilled(prompt)
        return tokens

    def _on_prefilled(self, prompt: SimulatedPrompt) -> None:
        if prompt.ticket is None:
            prompt.stage = "decoding"
            self._drop_ended(prompt)
        elif len(prompt.ended) == len(prompt.outputs):
            self._abort_ticket(prompt, "the first token ended every sequence")
            self._drop(prompt)
            asyncio.get_running_loop().call_soon(
                self._emit, prompt.owner, HandedOff(prompt.prompt_id, StageTimes(prefill_s=0.01))
            )
        else:
            prompt.stage = "sending"
            asyncio.get_running_loop().call_later(self._send_s(prompt), self._hand_off, prompt)

    def _send_s(self, prompt: SimulatedPrompt) -> float:
        return self.behaviour.send_s + prompt.num_tokens * self.behaviour.send_token_s

    def _hand_off(self, prompt: SimulatedPrompt) -> None:
        if self.prompts.get(prompt.prompt_id) is not prompt:
            return  # cancelled meanwhile
        assert prompt.state is not None
        assert prompt.ticket is not None
        state = replace(prompt.state, outputs=tuple(tuple(output) for output in prompt.outputs))
        try:
            if self.behaviour.fail_handoffs:
                self.behaviour.fail_handoffs -= 1
                raise HandoffFailed("set to fail")
            self._receiver_of(prompt.ticket).commit(prompt.ticket, state)
        except HandoffFailed as error:
            self._fail(prompt, error)
            return
        self._drop(prompt)
        times = StageTimes(prefill_s=0.01, send_s=self._send_s(prompt), kv_bytes=prompt.num_tokens, transport="fake")
        self._emit(prompt.owner, HandedOff(prompt.prompt_id, times))

    def _fail(self, prompt: SimulatedPrompt, error: Exception) -> None:
        if prompt.stage in ("waiting", "sending"):
            self._abort_ticket(prompt, str(error))
        self._drop(prompt)
        self._emit(prompt.owner, Failed(prompt.prompt_id, to_name(error), str(error)))

    def _abort_ticket(self, prompt: SimulatedPrompt, reason: str) -> None:
        if prompt.ticket is not None and prompt.ticket.instance_id in self.peers:
            self._receiver_of(prompt.ticket).abort(prompt.ticket, reason)

    def _measure_link(self, peer_id: str) -> tuple[LinkStatus | None, str]:
        if peer_id not in self.peers:
            return None, f"{peer_id} cannot be reached"
        return LinkStatus(peer_id, "fake", "up", 1, 0, 0, round_trip_s=0.0001, bytes_per_s=1e9), ""

    def _receiver_of(self, ticket: Ticket) -> "SimulatedInstance":
        peer = self.peers.get(ticket.instance_id)
        if peer is None or peer.description.epoch != ticket.epoch:
            raise HandoffFailed(f"no instance {ticket.instance_id} of epoch {ticket.epoch}")
        return peer

    def _drop_ended(self, prompt: SimulatedPrompt) -> None:
        if len(prompt.ended) < len(prompt.outputs):
            return
        if prompt.kept is None:
            self._drop(prompt)
        else:
            prompt.stage, prompt.blocks = "ended", 0
            self._freed()

    def _drop(self, prompt: SimulatedPrompt) -> None:
        self.prompts.pop(prompt.prompt_id, None)
        self._freed()

    def _freed(self) -> None:
        if len(self.sessions) > 1:
            asyncio.get_running_loop().call_soon(self._share_load)

    def _share_load(self) -> None:
        """Report freed blocks to all sessions."""
        for session in self.sessions:
            self._emit(session, Heartbeat(self.load()))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.description.block_size)

    def _emit(self, session: EventSink, event: Event) -> None:
        for one in self.sessions:
            if one is session:
                one.emit(event, lag_s=self.behaviour.lag_s)
