"""The prefill half: compute a prompt for a ticket, announce its KV layer by layer, commit, release at every finish.

accept --> the prompt's images are embedded, if any             (the image encoder's thread)
       --> engine computes chunks --on_layer--> sender.put      (engine thread, never blocks)
       --> first tokens are emitted         --> sender.commit   (engine thread)
       --> acked | failed --> blocks released, HandedOff | Failed (sender's threads)
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass

from engine.grammar.interface import Grammar
from engine.interface import Chunk, Embeddings, Engine, Prefilled
from kvtransfer.interface import Sender, SendStats
from processes.failpoints import failpoint
from telemetry.logs import EventLogger
from wire.convert import describe_prompt
from wire.errors import Cancelled, InternalError, InvalidRequest, NoCapacity, PdserveError, to_name
from wire.event_sink import EventSink
from wire.messages import Failed, HandedOff, Refused
from wire.shared_limits import hold_limit
from wire.types import PromptImage, PromptState, StageTimes, Ticket

_log = EventLogger("prefill")

Post = Callable[[Callable[[Engine], None]], None]
Embed = Callable[[Sequence[PromptImage]], "Future[tuple[Embeddings, ...]]"]
"""Returns the future of the images' embeddings; it is cancelled when the prompt is gone."""


@dataclass(slots=True)
class _HandOff:
    """One prompt being handed off. Guarded by the worker's lock."""

    owner: EventSink
    request_id: str
    ticket: Ticket
    blocks: int
    grammar: Grammar | None = None
    embeddings: "Future[tuple[Embeddings, ...]] | None" = None
    encode_s: float | None = None
    prefill_s: float | None = None
    cached_tokens: int = 0
    written_tokens: int = 0
    committed_at: float | None = None

    def take_embeddings(self) -> tuple[Embeddings, ...]:
        """Return the embeddings of its images, which the engine owns from now on."""
        future, self.embeddings = self.embeddings, None
        return () if future is None else future.result()


class PrefillWorker:
    """Owner of the prompts that this instance prefills for others; also the sender's event sink (SenderEvents)."""

    def __init__(
        self, engine: Engine, post: Post, post_release: Post, clock: Callable[[], float], embed: Embed | None = None
    ) -> None:
        """`post_release` posts calls that free blocks; `embed` is needed where the engine takes images."""
        self._engine, self._post, self._post_release = engine, post, post_release
        self._clock, self._embed = clock, embed
        self._sender: Sender | None = None
        self._lock = threading.Lock()
        self._hand_offs: dict[str, _HandOff] = {}
        self._prompt_by_ticket: dict[str, str] = {}

    def use(self, sender: Sender) -> None:
        """Bind the sender; its events are delivered to this worker."""
        self._sender = sender

    @property
    def sender(self) -> Sender:
        """The bound sender."""
        assert self._sender is not None
        return self._sender

    def accept(self, owner: EventSink, state: PromptState, ticket: Ticket, grammar: Grammar | None = None) -> None:
        """Start the prefill of a prompt with its compiled grammar; its events go to `owner`.

        Raises InvalidRequest (or a subclass) if its id is in use, it requests pooling or this engine can never run it,
        and NoCapacity while finished KV that waits for its receivers fills its share of the pool.
        """
        if state.pooling is not None:
            raise InvalidRequest(f"prompt {state.prompt_id} requests pooling, which has no KV hand-off", "pooling")
        self._engine.check(state, hold=True)
        num_blocks = self._engine.info.layout.num_blocks_for(len(state.token_ids))
        hand_off = _HandOff(owner, state.request_id, ticket, num_blocks, grammar)
        with self._lock:
            if state.prompt_id in self._hand_offs:
                raise InvalidRequest(f"prompt {state.prompt_id} is already being prefilled on this instance")
            if not state.probe:
                self._refuse_while_much_is_held()
            self._hand_offs[state.prompt_id] = hand_off
            self._prompt_by_ticket[ticket.ticket_id] = state.prompt_id
        self._begin(state, ticket)
        if state.images:
            self._await_embeddings(state, hand_off)
        else:
            self._post(lambda engine: self._add(engine, state, hand_off))

    def on_layer(self, layer: int, chunks: Sequence[Chunk]) -> None:
        """Announce a layer's KV of this step's chunks, except what the receiver holds already. Engine thread."""
        for chunk in chunks:
            hand_off = self._hand_offs.get(chunk.prompt_id)
            if hand_off is not None:
                failpoint("prefill.in_chunk")
                start = max(chunk.start, hand_off.ticket.first_token)
                if start < chunk.end:
                    self.sender.put(hand_off.ticket.ticket_id, layer, start, chunk.end, chunk.block_ids)

    def on_prefilled(self, prefilled: Prefilled) -> None:
        """Commit after the first tokens were emitted, or end the ticket if the prompt has finished. Engine thread."""
        prompt_id = prefilled.state.prompt_id
        with self._lock:
            hand_off = self._hand_offs.get(prompt_id)
            if hand_off is None:
                return
            hand_off.prefill_s, hand_off.committed_at = prefilled.seconds, self._clock()
            hand_off.cached_tokens, hand_off.written_tokens = prefilled.cached_tokens, prefilled.written_tokens
        try:
            if prefilled.finished:
                self._end_early(prompt_id, prefilled)
            else:
                self.sender.commit(hand_off.ticket.ticket_id, describe_prompt(prefilled.state))
        except Exception as error:  # noqa: BLE001 - the outermost frame of this prompt's commit: others continue
            _log.error("commit_failed", error, request_id=hand_off.request_id, error=error)
            if self.on_failed(prompt_id, error):
                self._drop(prompt_id)

    def on_failed(self, prompt_id: str, error: BaseException) -> bool:
        """Emit Failed for a prompt that the engine gave up on. Returns whether this worker owned it."""
        hand_off = self._pop_hand_off(prompt_id)
        if hand_off is None:
            return False
        self.sender.abort(hand_off.ticket.ticket_id, str(error))
        hand_off.owner.emit(Failed(prompt_id, to_name(error), str(error)))
        return True

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        """The receiver committed: free the blocks and notify the scheduler."""
        ended = self._forget_ticket(ticket_id)
        if ended is None:
            return
        prompt_id, hand_off = ended
        self._post_release(lambda engine: engine.release(prompt_id))
        send_s = None if hand_off.committed_at is None else self._clock() - hand_off.committed_at
        _log.debug(
            "kv_sent", request_id=hand_off.request_id, ticket=ticket_id, bytes=stats.kv_bytes, tail_s=send_s,
            total_s=stats.seconds,
        )  # fmt: skip
        times = StageTimes(
            encode_s=hand_off.encode_s,
            prefill_s=hand_off.prefill_s,
            send_s=send_s,
            kv_bytes=stats.kv_bytes,
            transport=stats.transport,
            kv_bytes_early=stats.early_bytes,
            cached_tokens=hand_off.cached_tokens,
            written_tokens=hand_off.written_tokens,
        )
        hand_off.owner.emit(HandedOff(prompt_id, times))

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        """The hand-off failed: free the blocks and report the reason to the scheduler."""
        ended = self._forget_ticket(ticket_id)
        if ended is None:
            return
        prompt_id, hand_off = ended
        _log.warning("handoff_failed", request_id=hand_off.request_id, ticket=ticket_id, error=error)
        self._drop(prompt_id)
        hand_off.owner.emit(Failed(prompt_id, to_name(error), str(error)))

    def cancel(self, owner: EventSink, prompt_id: str, reason: str) -> bool:
        """Cancel a prompt of this owner. Returns whether there was one."""
        hand_off = self._pop_hand_off(prompt_id, owner)
        if hand_off is None:
            return False
        self.sender.abort(hand_off.ticket.ticket_id, reason)
        self._drop(prompt_id)
        owner.emit(Failed(prompt_id, Cancelled.__name__, reason))
        return True

    def cancel_all(self, owner: EventSink, reason: str) -> None:
        """Cancel every prompt of this owner."""
        for prompt_id in list(self._hand_offs):
            self.cancel(owner, prompt_id, reason)

    def owner_of(self, prompt_id: str) -> EventSink | None:
        """Return the owner of a prompt that is prefilled or handed off here, None for any other. Any thread."""
        hand_off = self._hand_offs.get(prompt_id)
        return None if hand_off is None else hand_off.owner

    def hold_finishes(self) -> AbstractContextManager[object]:
        """Return a lock: while it is held, no prompt of this half can finish, so events emitted meanwhile come first.

        Do nothing but emit events while it is held.
        """
        return self._lock

    def _end_early(self, prompt_id: str, prefilled: Prefilled) -> None:
        """Abort the ticket of a prompt that has finished; the engine has freed its blocks."""
        hand_off = self._pop_hand_off(prompt_id)
        if hand_off is not None:  # else it ended in the meantime, and its event was emitted
            self.sender.abort(hand_off.ticket.ticket_id, "the first token ended every sequence")
            times = StageTimes(
                encode_s=hand_off.encode_s, prefill_s=prefilled.seconds, cached_tokens=prefilled.cached_tokens,
                written_tokens=prefilled.written_tokens,
            )  # fmt: skip
            hand_off.owner.emit(HandedOff(prompt_id, times))

    def _refuse_while_much_is_held(self) -> None:
        """Raise NoCapacity while finished KV, held under leases, fills its share of the pool. The lock is held."""
        held = [hand_off.blocks for hand_off in self._hand_offs.values() if hand_off.prefill_s is not None]
        total = self._engine.info.layout.num_blocks
        if sum(held) >= hold_limit(total):
            raise NoCapacity(
                f"finished prompts ({len(held)}) that wait for their receivers hold {sum(held)} of {total} KV blocks, "
                f"and the limit is {hold_limit(total)}"
            )

    def _begin(self, state: PromptState, ticket: Ticket) -> None:
        """Open the ticket. Re-raises an error unless the ticket's own failure was emitted in the meantime."""
        try:
            self.sender.begin(ticket)
        except Exception as error:
            if self._pop_hand_off(state.prompt_id) is not None:
                self.sender.abort(ticket.ticket_id, "it could not be opened")
                raise
            _log.error("handoff_begin_failed", error, request_id=state.request_id, error=error)

    def _await_embeddings(self, state: PromptState, hand_off: _HandOff) -> None:
        """Queue the prompt when its images are embedded; the ticket is open, so that its lease is renewed meanwhile."""
        assert self._embed is not None, "an engine that takes images has an encoder"
        began, future = self._clock(), self._embed(state.images)
        hand_off.embeddings = future
        future.add_done_callback(lambda _: self._embedded(state, hand_off, self._clock() - began))
        if self._hand_offs.get(state.prompt_id) is not hand_off:  # it ended before the future was there to be cancelled
            future.cancel()

    def _embedded(self, state: PromptState, hand_off: _HandOff, seconds: float) -> None:
        """Any thread."""
        future, hand_off.encode_s = hand_off.embeddings, seconds
        assert future is not None
        error = None if future.cancelled() else future.exception()
        if error is None:
            self._post(lambda engine: self._add(engine, state, hand_off))
        elif self._hand_offs.get(state.prompt_id) is hand_off:
            self._refuse(state, error)

    def _refuse(self, state: PromptState, error: BaseException) -> None:
        """Emit Refused for a prompt that the engine does not have yet."""
        hand_off = self._pop_hand_off(state.prompt_id)
        if hand_off is not None:
            known = (
                error if isinstance(error, PdserveError) else InternalError("the prompt's images cannot be embedded")
            )
            hand_off.owner.emit(Refused.with_error(state.prompt_id, known))
            self.sender.abort(hand_off.ticket.ticket_id, str(known))

    def _add(self, engine: Engine, state: PromptState, hand_off: _HandOff) -> None:
        """Queue the prompt unless it was forgotten because its link failed: nothing would free its blocks then."""
        if self._hand_offs.get(state.prompt_id) is not hand_off:
            return
        try:
            failpoint("prefill.before_chunk")
            engine.add(state, hold=True, grammar=hand_off.grammar, embeddings=hand_off.take_embeddings())
        except Exception as error:  # noqa: BLE001 - the outermost frame of queueing this prompt: emits Failed
            _log.error("queueing_failed", error, request_id=state.request_id, error=error)
            self.on_failed(state.prompt_id, error)

    def _drop(self, prompt_id: str) -> None:
        def drop(engine: Engine) -> None:
            engine.cancel(prompt_id)
            engine.release(prompt_id)

        self._post_release(drop)

    def _pop_hand_off(self, prompt_id: str, owner: EventSink | None = None) -> _HandOff | None:
        """Remove and return a prompt's hand-off; if `owner` is given, only if the prompt is the owner's."""
        with self._lock:
            hand_off = self._hand_offs.get(prompt_id)
            if hand_off is None or (owner is not None and hand_off.owner is not owner):
                return None
            del self._hand_offs[prompt_id], self._prompt_by_ticket[hand_off.ticket.ticket_id]
        if hand_off.embeddings is not None:
            hand_off.embeddings.cancel()
        return hand_off

    def _forget_ticket(self, ticket_id: str) -> tuple[str, _HandOff] | None:
        with self._lock:
            prompt_id = self._prompt_by_ticket.get(ticket_id)
        hand_off = None if prompt_id is None else self._pop_hand_off(prompt_id)
        return None if prompt_id is None or hand_off is None else (prompt_id, hand_off)
