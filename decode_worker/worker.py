"""The decode half: reserve blocks under a ticket, admit the received KV, generate, free the blocks at every finish.

reserve --> Reserved(ticket) --> frames received (receiver threads) --> committed --> engine.admit --> Step ...
 the prefix held here is pinned                                       the prompt's blocks are found by name from here
                                                                    \\-> ended     --> blocks freed, Failed
generate --> engine.add --> Step ...                     prefill and decode on this instance
"""

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from engine.finish import finish_of
from engine.grammar.interface import Grammar
from engine.interface import Embeddings, Engine, PooledPrompt
from kvtransfer.interface import Receiver
from processes.failpoints import failpoint
from telemetry.logs import EventLogger
from wire.convert import read_prompt
from wire.errors import Cancelled, HandoffFailed, InvalidRequest, NoCapacity, PdserveError, to_name
from wire.event_sink import EventSink
from wire.kept_stream import KeptStream, adopt_stream, keep_stream
from wire.messages import Adopt, Failed, Pooled, Refused, Reserved
from wire.turns import Turns
from wire.types import PromptState, StageTimes, Ticket, TokenOutput

_log = EventLogger("decode")

Post = Callable[[Callable[[Engine], None]], None]


@dataclass(frozen=True, slots=True)
class _Reservation:
    """Blocks waiting for a prompt's KV."""

    owner: EventSink
    state: PromptState
    ticket_id: str
    grammar: Grammar | None = None


@dataclass(slots=True)
class _Running:
    """A prompt that generates here: the sequences that have not finished, and its tokens if it may be resumed.

    A prompt whose tokens are kept stays here after its end, until it is released or has no owner for too long.
    """

    owner: EventSink
    sequences: set[int]
    kept: KeptStream | None = None


class DecodeWorker:
    """Owner of reservations and of prompts that decode here; also the receiver's event sink (ReceiverEvents)."""

    def __init__(self, engine: Engine, post: Post, post_release: Post, clock: Callable[[], float]) -> None:
        """`post_release` posts calls that free blocks."""
        self._engine, self._post, self._post_release, self._clock = engine, post, post_release, clock
        self._receiver: Receiver | None = None
        self._turns = Turns()  # event loop only
        self._lock = threading.RLock()  # on_tokens is called with it held
        self._reservations: dict[str, _Reservation] = {}
        self._prompt_by_ticket: dict[str, str] = {}
        self._running: dict[str, _Running] = {}
        self._keeps_streams = False  # whether it ever kept a stream: without one, a token costs nothing here
        engine.arriving = lambda: [one.state.gap_limit_s for one in self._reservations.copy().values()]

    def use(self, receiver: Receiver) -> None:
        """Bind the receiver; its events are delivered to this worker."""
        self._receiver = receiver

    @property
    def receiver(self) -> Receiver:
        """The bound receiver."""
        assert self._receiver is not None
        return self._receiver

    def reserve(self, owner: EventSink, state: PromptState, grammar: Grammar | None = None) -> None:
        """Emit Reserved with a ticket to the prompt's owner, or Refused after releasing everything taken."""
        began = self._clock()
        layout = self._engine.info.layout
        try:
            failpoint("decode.reserve")
            if state.pooling is not None:
                raise InvalidRequest(f"prompt {state.prompt_id} requests pooling, which has no KV hand-off")
            self._refuse_a_second(state.prompt_id)
            if not state.probe:  # a probe releases its blocks at once
                self._refuse_while_others_wait(owner)
            block_ids, num_held = self._take_blocks(state)
        except PdserveError as error:
            if isinstance(error, NoCapacity) and not state.probe:
                self._turns.wait(owner)
            owner.emit(Refused.with_error(state.prompt_id, error))
            return
        if not state.probe and self._turns.leave(owner):
            self._post_release(_wake)  # blocks may be left for the next waiting prompt
        reservation = _Reservation(owner, state, secrets.token_hex(16), grammar)
        with self._lock:
            self._reservations[state.prompt_id] = reservation
            self._prompt_by_ticket[reservation.ticket_id] = state.prompt_id
        ticket = self._open(reservation, block_ids, first_token=num_held * layout.block_size)
        with self._lock:
            if self._reservations.get(state.prompt_id) is reservation:  # else it has ended in the meantime
                owner.emit(Reserved(state.prompt_id, ticket, self._clock() - began))

    def generate(
        self, owner: EventSink, state: PromptState, grammar: Grammar | None = None,
        embeddings: Sequence[Embeddings] = (),
    ) -> None:  # fmt: skip
        """Run prefill and decode of a prompt on this instance, with the embeddings of its images.

        Raises InvalidRequest if it can never run.
        """
        self._engine.check(state)
        self._refuse_a_second(state.prompt_id)
        with self._lock:
            self._running[state.prompt_id] = self._new_running(owner, state)
        self._post(lambda engine: self._add(engine, state, grammar, embeddings))

    def committed(self, ticket_id: str, description: bytes, block_ids: tuple[int, ...], kv_bytes: int) -> None:
        """Admit the prompt: every frame has been received. If this raises, `ended` releases the blocks."""
        state = _read(ticket_id, description)
        self._engine.check(state)
        with self._lock:
            prompt_id = self._prompt_by_ticket.get(ticket_id)
            reservation = self._reservations.get(prompt_id) if prompt_id is not None else None
            if prompt_id is None or reservation is None:
                raise HandoffFailed(f"ticket {ticket_id} has no reservation on this instance any more")
            if not _is_same(state, reservation.state) or not (state.outputs or state.beams):
                what = "describes a different prompt from the reserved one, or has no output"
                raise HandoffFailed(f"the commit of {ticket_id} {what}")
            del self._reservations[prompt_id], self._prompt_by_ticket[ticket_id]
            stream = reservation.state.stream  # a commit's description has none
            kept = state if stream is None else replace(state, stream=stream)
            self._running[prompt_id] = self._new_running(reservation.owner, kept)
            # under the lock: a cancel that finds the prompt running must be posted to the engine after the admission
            self._post(lambda engine: self._admit(engine, state, block_ids, reservation.grammar))
        _log.debug("kv_received", request_id=state.request_id, ticket=ticket_id, bytes=kv_bytes)

    def ended(self, ticket_id: str, block_ids: tuple[int, ...], reason: str) -> None:
        """Free the blocks of a ticket that ended without commit, and emit Failed."""
        self._engine.blocks.release(block_ids)
        self._post_release(_wake)
        with self._lock:
            prompt_id = self._prompt_by_ticket.pop(ticket_id, None)
            reservation = self._reservations.pop(prompt_id, None) if prompt_id is not None else None
        if prompt_id is not None and reservation is not None:
            _log.info("reservation_ended", request_id=reservation.state.request_id, ticket=ticket_id, reason=reason)
            reservation.owner.emit(Failed(prompt_id, HandoffFailed.__name__, reason))

    def on_tokens(self, tokens: Iterable[TokenOutput]) -> None:
        """Record which sequences finished, and keep the tokens of streams. Engine thread."""
        with self._lock:
            for token in tokens:
                if self._keeps_streams:
                    self._keep(token)
                if token.finish is not None:
                    self._on_finished(token.prompt_id, token.sequence)

    def on_pooled(self, pooled: PooledPrompt) -> None:
        """Emit the vectors of a pooling prompt. Engine thread."""
        with self._lock:
            ended = self._running.pop(pooled.prompt_id, None)
        if ended is not None:
            times = StageTimes(prefill_s=pooled.seconds, cached_tokens=pooled.cached_tokens)
            ended.owner.emit(Pooled(pooled.prompt_id, pooled.values, times))

    def on_failed(self, prompt_id: str, error: BaseException) -> bool:
        """Emit Failed for a prompt that the engine gave up on. Returns whether this worker owned it."""
        with self._lock:
            ended = self._running.pop(prompt_id, None)
        if ended is not None:
            ended.owner.emit(Failed(prompt_id, to_name(error), str(error)))
        return ended is not None

    def adopt(self, owner: EventSink, command: Adopt) -> tuple[TokenOutput, ...]:
        """Make `owner` the owner of a stream and return the tokens so far; refuse a stream that is not here."""
        with self._lock:
            arriving = [one.state for one in self._reservations.values()]
            return adopt_stream(owner, command, self._running.values(), arriving)

    def cancel(
        self, owner: EventSink, prompt_id: str, sequence: int | None, reason: str, answer: Callable[..., None],
        owner_epoch: int = 0,
    ) -> None:  # fmt: skip
        """Cancel a prompt of this owner, or one of its sequences; `answer` receives the finishes.

        For a stream, `owner_epoch` must be the current one; a whole stream is dropped without an answer.
        """
        with self._lock:
            reservation = self._reservations.get(prompt_id)
            if reservation is not None and reservation.owner is owner:
                del self._reservations[prompt_id], self._prompt_by_ticket[reservation.ticket_id]
            else:
                reservation = None
            running = self._running.get(prompt_id)
            is_owned = running is not None and running.owner is owner
            if is_owned and running is not None and running.kept is not None:
                if not running.kept.is_current(owner_epoch):
                    return
                if sequence is None:
                    self._drop([prompt_id])
                    return
        if reservation is not None:
            self.receiver.abort(reservation.ticket_id, reason)
            owner.emit(Failed(prompt_id, Cancelled.__name__, reason))
        elif is_owned:
            self._post(lambda engine: answer(engine.cancel(prompt_id, sequence)))

    def cancel_all(self, owner: EventSink, reason: str, *, keep_streams: bool = False) -> bool:
        """Cancel every prompt of this owner without emitting events: its session has ended.

        With `keep_streams`, streams of which a client may already have output continue; return whether there are any.
        """
        self._turns.leave(owner)
        with self._lock:
            reserved = [one for one in self._reservations.values() if one.owner is owner]
            owned = {prompt_id: one.kept for prompt_id, one in self._running.items() if one.owner is owner}
            lost = [id_ for id_, kept in owned.items() if not keep_streams or kept is None or not kept.has_output]
            for reservation in reserved:
                del self._reservations[reservation.state.prompt_id], self._prompt_by_ticket[reservation.ticket_id]
            self._drop(lost)
        for reservation in reserved:
            self.receiver.abort(reservation.ticket_id, reason)
        return len(owned) > len(lost)

    def owner_of(self, prompt_id: str) -> EventSink | None:
        """Return the owner of a prompt that is admitted or generates here, None for any other. Any thread."""
        running = self._running.get(prompt_id)
        return None if running is None else running.owner

    def hold_finishes(self) -> AbstractContextManager[object]:
        """Return a lock: while it is held, no prompt of this half can finish, so events emitted meanwhile come first.

        While holding it, only emit events and call this worker.
        """
        return self._lock

    def _new_running(self, owner: EventSink, state: PromptState) -> _Running:
        """The lock is held."""
        kept = keep_stream(state, self._running.values())
        self._keeps_streams |= kept is not None
        return _Running(owner, self._unfinished_sequences(state), kept)

    def _keep(self, token: TokenOutput) -> None:
        """Keep a token of a stream; end one that has run too long without an owner. The lock is held."""
        running = self._running.get(token.prompt_id)
        if running is None or running.kept is None:
            return
        if not running.kept.add(token, owned=not running.owner.ended):
            self._drop([token.prompt_id])

    def _drop(self, prompt_ids: Sequence[str]) -> None:
        """Forget prompts, and cancel what the engine has of them. The lock is held."""
        for prompt_id in prompt_ids:
            del self._running[prompt_id]
        self._post_release(lambda engine: _cancel_each(engine, prompt_ids))

    def _refuse_a_second(self, prompt_id: str) -> None:
        with self._lock:
            known = prompt_id in self._reservations or prompt_id in self._running
        if known:
            raise InvalidRequest(f"prompt {prompt_id} is already on this instance")

    def _refuse_while_others_wait(self, owner: EventSink) -> None:
        """A reservation must starve neither a prompt that was preempted from a full pool nor another scheduler."""
        if not self._turns.may_take(owner, self._clock()):
            raise NoCapacity("another scheduler's prompt waits here for KV blocks")
        waiting = self._engine.load().waiting
        if waiting:
            raise NoCapacity(f"prompts already wait here for KV blocks: {waiting}")

    def _take_blocks(self, state: PromptState) -> tuple[tuple[int, ...], int]:
        """Take the prompt's blocks; return them and the number of leading ones that already hold its KV."""
        blocks, num_tokens = self._engine.blocks, len(state.token_ids)
        prefix = blocks.chain(state).names(state.token_ids, num_tokens)
        return blocks.take(self._engine.info.layout.num_blocks_for(num_tokens), prefix, probe=state.probe)

    def _open(self, reservation: _Reservation, block_ids: tuple[int, ...], first_token: int) -> Ticket:
        ticket_id, num_tokens = reservation.ticket_id, len(reservation.state.token_ids)
        try:
            return self.receiver.open(ticket_id, num_tokens=num_tokens, first_token=first_token, block_ids=block_ids)
        except BaseException:
            with self._lock:
                del self._reservations[reservation.state.prompt_id], self._prompt_by_ticket[reservation.ticket_id]
            self._engine.blocks.release(block_ids)
            raise

    def _unfinished_sequences(self, state: PromptState) -> set[int]:
        """Return the sequences that the engine will still finish: all but those that have finished already."""
        length, longest = len(state.token_ids), self._engine.info.max_model_len
        ended = {
            index
            for index, output in enumerate(state.outputs)
            if finish_of(output, state.params, prompt_length=length, max_model_len=longest) is not None
        }
        sequences = set(range(state.params.num_sequences))
        return sequences if state.params.beam_search is not None else sequences - ended

    def _add(
        self, engine: Engine, state: PromptState, grammar: Grammar | None, embeddings: Sequence[Embeddings]
    ) -> None:
        try:
            engine.add(state, grammar=grammar, embeddings=embeddings)
        except Exception as error:  # noqa: BLE001 - the outermost frame of queueing this prompt: emits Failed
            _log.error("queueing_failed", error, request_id=state.request_id, error=error)
            self.on_failed(state.prompt_id, error)

    def _admit(self, engine: Engine, state: PromptState, block_ids: tuple[int, ...], grammar: Grammar | None) -> None:
        with self._lock:
            known = state.prompt_id in self._running
        if not known:
            engine.blocks.release(block_ids)
            return
        try:
            engine.admit(state, block_ids, grammar)
        except Exception as error:  # noqa: BLE001 - the outermost frame of admitting this prompt: emits Failed
            _log.error("admission_failed", error, request_id=state.request_id, error=error)
            engine.blocks.release(block_ids)
            self.on_failed(state.prompt_id, error)

    def _on_finished(self, prompt_id: str, sequence: int) -> None:
        running = self._running.get(prompt_id)
        if running is not None:
            running.sequences.discard(sequence)
            if not running.sequences and running.kept is None:
                del self._running[prompt_id]


def _read(ticket_id: str, description: bytes) -> PromptState:
    """Parse a commit's description. It was written by P, so an unreadable one is not the client's fault."""
    try:
        return read_prompt(description)
    except InvalidRequest as error:
        raise HandoffFailed(f"the commit of {ticket_id} cannot be read: {error}") from error


def _is_same(described: PromptState, reserved: PromptState) -> bool:
    """Return whether P describes the reserved prompt: its KV is cached under its tokens and images, for its tenant."""
    from_commit, from_reserve = (
        (state.prompt_id, state.token_ids, state.cache_salt, state.probe, state.images)
        for state in (described, reserved)
    )
    return from_commit == from_reserve


def _cancel_each(engine: Engine, prompt_ids: Iterable[str]) -> None:
    for prompt_id in prompt_ids:
        engine.cancel(prompt_id)


def _wake(_: Engine) -> None:
    """Wake the engine thread: blocks were freed that a waiting prompt may need."""
