"""A prefill and a decode instance that the test drives: posts, messages and steps happen when it calls for them."""

from collections import deque
from collections.abc import Callable, Sequence

from engine.core import EngineCore
from engine.interface import Engine
from engine.step import PendingStep, StepBatch
from instance.workers import Workers
from kvtransfer.interface import SendStats
from testing.engine.fake_model import FakeConfig, FakeModel
from wire.errors import HandoffFailed, PdserveError
from wire.load import LinkStatus, LoadSnapshot
from wire.messages import Adopt, Adopted, Cancel, Event, Failed, HandedOff, Refused, Reserved, Step
from wire.types import KvEndpoint, PromptState, Ticket

CONFIG = FakeConfig(salt=3, num_layers=1, block_size=16, num_blocks=14, vocab_size=60, max_model_len=160)
STATS = SendStats("tcp", 1, 0.0, 0)
LOAD = LoadSnapshot(blocks_total=1)


class Breaking(FakeModel):
    """Fails its next step when `breaks` is set."""

    breaks = False

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        if self.breaks:
            self.breaks = False
            raise RuntimeError("a defect")
        return super().launch(batch, layer_done)


class Owner:
    """A scheduler's session: one of the two of a side, which owns every second prompt."""

    def __init__(self, side: "Side", number: int) -> None:
        self._side, self._number, self.ended = side, number, False

    def owns(self, prompt_id: str) -> bool:
        return int(prompt_id[1:]) % 2 == self._number

    def emit(self, event: Event) -> None:
        if not self.ended:
            self._side.receive(self, event)


class Side:
    """One instance that the test drives: posted calls and steps run when it calls for them."""

    def __init__(self, link: "Link", config: FakeConfig) -> None:
        self.model = Breaking(config)
        self.core = EngineCore(
            self.model, max_num_seqs=5, max_num_batched_tokens=80, prefill_chunk_size=48,
            swap_bytes=3 * CONFIG.block_size * 256,
        )  # fmt: skip
        self.posted: deque[Callable[[Engine], None]] = deque()
        self.workers = Workers(self.core, self.posted.append, lambda: LOAD, lambda: 0.0)
        self.workers.prefill.use(SendingEnd(link))
        self.workers.decode.use(link)
        self.tickets: dict[str, Ticket] = {}
        self.failed: list[str] = []
        self.ended: list[str] = []
        self.finished: list[tuple[str, int]] = []
        self.silent: set[str] = set()
        self.owners = [Owner(self, 0), Owner(self, 1)]
        self.orphans: list[Owner] = []  # ended, and their streams may be adopted
        self.epochs: dict[str, int] = {}  # of adopted streams
        self.wrong: list[str] = []  # noted, not raised: the halves handle what their listener raises

    def owner(self, prompt_id: str) -> Owner:
        """Return the prompt's owner."""
        return self.owners[int(prompt_id[1:]) % 2]

    def end_session(self, number: int, *, keep_streams: bool = False) -> None:
        """End one of the sessions, and open the next of this scheduler."""
        owner = self.owners[number]
        owner.ended = True
        self.workers.cancel_all(owner, "the session is over", keep_streams=keep_streams)
        self.owners[number] = Owner(self, number)
        self.orphans += [owner] if keep_streams else []

    def end_orphans(self) -> None:
        """End the streams that no session has adopted."""
        while self.orphans:
            self.workers.cancel_all(self.orphans.pop(), "nobody has adopted it")

    def cancel(self, prompt_id: str, sequence: int | None = None) -> None:
        """Cancel a prompt or a sequence; the end of a whole stream has no event."""
        running = self.workers.decode._running.get(prompt_id)
        owner = self.owner(prompt_id)
        if sequence is None and running is not None and running.owner is owner and running.kept is not None:
            self.silent.add(prompt_id)
        command = Cancel(prompt_id, sequence, owner_epoch=self.epochs.get(prompt_id, 0))
        self.workers.cancel(owner, command)

    def adopt(self, prompt_id: str, stream_id: str) -> None:
        """Adopt a stream for the session that owns this prompt; it gets the tokens again."""
        self.workers.adopt(self.owner(prompt_id), Adopt(stream_id, ""))

    def receive(self, owner: Owner, event: Event) -> None:
        """Record the event; no event may follow for a prompt that has ended, or whose session has."""
        if not all(map(owner.owns, _prompts_of(event))):
            self.wrong.append(f"to another session: {event}")
        if isinstance(event, Adopted):
            self._begin_again(event.prompt)
        if _prompts_of(event) & (self.silent | {*self.failed, *self.ended}):
            self.wrong.append(f"after its end: {event}")
        match event:
            case Reserved(prompt_id=prompt_id, ticket=ticket):
                self.tickets[prompt_id] = ticket
            case Failed(error="StreamMoved") | Refused(error="UnknownStream"):
                pass
            case Failed(prompt_id=prompt_id) | Refused(prompt_id=prompt_id):
                self.failed.append(prompt_id)
            case HandedOff(prompt_id=prompt_id):
                self.ended.append(prompt_id)
            case Step(tokens=tokens):
                for token in tokens:
                    if (token.prompt_id, token.sequence) in self.finished:
                        self.wrong.append(f"after its sequence's end: {token}")
                    if token.finish is not None:
                        self.finished.append((token.prompt_id, token.sequence))

    def _begin_again(self, state: PromptState) -> None:
        assert state.stream is not None
        self.epochs[state.prompt_id] = state.stream.owner_epoch
        self.silent.discard(state.prompt_id)
        self.finished = [one for one in self.finished if one[0] != state.prompt_id]

    def run_posts(self) -> None:
        """Run the calls posted to the engine's thread."""
        while self.posted:
            self.posted.popleft()(self.core)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Run the posted calls and one step; `meanwhile` runs before the step is reported."""
        self.run_posts()
        result = self.core.step(self.workers.prefill.on_layer)
        meanwhile()
        self.workers.on_step(result)

    def check_empty(self) -> None:
        """Assert that no state of any prompt is left, and that no event was wrong."""
        assert self.wrong == []
        prefill, decode = self.workers.prefill, self.workers.decode
        assert (prefill._hand_offs, prefill._prompt_by_ticket) == ({}, {})
        assert (decode._running, decode._reservations, decode._prompt_by_ticket) == ({}, {}, {})
        assert self.core._batch.prompts() == []
        assert (self.core.blocks.num_used, self.core.load().blocks_swapped) == (0, 0)
        self.core.blocks.check()


class Link:
    """The link of the two (a Receiver, and by SendingEnd a Sender); messages arrive when the test delivers them."""

    bytes_received = 0
    endpoints: tuple[KvEndpoint, ...] = ()

    def __init__(self, config: FakeConfig = CONFIG) -> None:
        self.open_tickets: dict[str, tuple[int, ...]] = {}
        self.sending: dict[str, None] = {}  # ordered: ids are random, a test's choices must not be
        self.commits: dict[str, bytes] = {}
        self.news: deque[Callable[[], None]] = deque()
        self.breaks_at_begin = self.breaks_at_commit = False
        self.p = Side(self, config)
        self.d = Side(self, config)

    def open(self, ticket_id: str, *, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> Ticket:
        self.open_tickets[ticket_id] = tuple(block_ids)
        return Ticket(ticket_id, 1, "decode-0", num_tokens, first_token, 10.0, ())

    def begin(self, ticket: Ticket) -> None:
        if self.breaks_at_begin:
            self.breaks_at_begin = False
            raise RuntimeError("can't start new thread")
        self.sending[ticket.ticket_id] = None
        if ticket.ticket_id not in self.open_tickets:
            self.news.append(lambda: self.fail_on_p(ticket.ticket_id))

    def put(self, ticket_id: str, layer: int, start: int, end: int, block_ids: Sequence[int]) -> None:
        """No bytes move here."""

    def commit(self, ticket_id: str, description: bytes) -> None:
        if self.breaks_at_commit:
            self.breaks_at_commit = False
            raise RuntimeError("a defect")
        if ticket_id in self.sending:
            self.commits[ticket_id] = description

    def abort(self, ticket_id: str, reason: str) -> None:
        """The receiver's owner ends the ticket, and is notified on its own thread."""
        self.end_on_d(ticket_id, reason)

    def abort_on_p(self, ticket_id: str, reason: str) -> None:
        """The sender's owner ends the ticket, and the receiver is notified later."""
        self.sending.pop(ticket_id, None)
        self.commits.pop(ticket_id, None)
        self.news.append(lambda: self.end_on_d(ticket_id, reason))

    def end_on_d(self, ticket_id: str, reason: str) -> None:
        """The ticket ends on the receiver."""
        block_ids = self.open_tickets.pop(ticket_id, None)
        if block_ids is not None:
            self.news.append(lambda: self.fail_on_p(ticket_id))
            self.d.workers.decode.ended(ticket_id, block_ids, reason)

    def fail_on_p(self, ticket_id: str) -> None:
        """The ticket ends on the sender, and its owner is notified once."""
        if ticket_id in self.sending:
            self.sending.pop(ticket_id)
            self.commits.pop(ticket_id, None)
            self.p.workers.prefill.failed(ticket_id, HandoffFailed("over on the receiver"))

    def deliver(self, ticket_id: str) -> None:
        """A commit arrives, and its answer is sent back."""
        description, block_ids = self.commits.pop(ticket_id), self.open_tickets.pop(ticket_id, None)
        if block_ids is None:
            self.news.append(lambda: self.fail_on_p(ticket_id))
            return
        try:
            self.d.workers.decode.committed(ticket_id, description, block_ids, 1)
        except PdserveError as error:
            self.d.workers.decode.ended(ticket_id, block_ids, str(error))
            self.news.append(lambda: self.fail_on_p(ticket_id))
        else:
            self.news.append(lambda: self.ack(ticket_id))

    def ack(self, ticket_id: str) -> None:
        """The receiver's ack arrives."""
        if ticket_id in self.sending:
            self.sending.pop(ticket_id)
            self.p.workers.prefill.acked(ticket_id, STATS)

    def close(self) -> None:
        """Nothing is held."""


class SendingEnd:
    """The link as P sees it."""

    bytes_sent = 0

    def __init__(self, link: Link) -> None:
        self.begin, self.put, self.commit, self.abort = link.begin, link.put, link.commit, link.abort_on_p

    def links(self) -> tuple[LinkStatus, ...]:
        return ()

    def close(self) -> None:
        """Nothing is held."""


def _prompts_of(event: Event) -> set[str]:
    if isinstance(event, Step):
        return {token.prompt_id for token in event.tokens} | {prompt_id for prompt_id, _ in event.times}
    if isinstance(event, Refused) and event.error == "UnknownStream":
        return set()
    return {event.prompt_id} if isinstance(event, Reserved | Failed | Refused | HandedOff) else set()
