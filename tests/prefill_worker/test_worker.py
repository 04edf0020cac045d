"""The prefill half under every order of its callers: blocks are freed, and each prompt finishes once."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from engine.core import EngineCore
from engine.interface import Engine
from kvtransfer.interface import SendStats
from prefill_worker.worker import PrefillWorker
from tests.engine.fake_engines import engine, prompt
from wire.convert import read_prompt
from wire.errors import InstanceLost, InvalidRequest, NoCapacity
from wire.load import LinkStatus
from wire.messages import Event, Failed, HandedOff
from wire.types import Pooling, PromptState, Ticket, TokenOutput

STATS = SendStats("tcp", 1, 0.0, 0)


def ticket_for(state: PromptState, number: int = 1) -> Ticket:
    return Ticket(f"{number:032x}", 7, "decode-0", len(state.token_ids), 0, 10.0, ())


@dataclass
class ScriptedSender:
    """A sender whose `begin` runs the test's callback, as a link that fails at once would."""

    on_begin: Callable[[Ticket], None] = lambda _: None
    on_commit: Callable[[str], None] = lambda _: None
    messages: list[tuple[str, str]] = field(default_factory=list)
    descriptions: list[bytes] = field(default_factory=list)
    bytes_sent: int = 0

    def begin(self, ticket: Ticket) -> None:
        self.messages.append(("begin", ticket.ticket_id))
        self.on_begin(ticket)

    def put(self, ticket_id: str, layer: int, start: int, end: int, block_ids: Sequence[int]) -> None:
        self.messages.append(("put", ticket_id))

    def commit(self, ticket_id: str, description: bytes) -> None:
        self.on_commit(ticket_id)
        self.descriptions.append(description)
        self.messages.append(("commit", ticket_id))

    def abort(self, ticket_id: str, reason: str) -> None:
        self.messages.append(("abort", ticket_id))

    def links(self) -> tuple[LinkStatus, ...]:
        return ()

    def close(self) -> None:
        """Nothing is held."""


@dataclass(eq=False)
class Half:
    """A prefill half over a real engine that the test drives: `turn` runs the posted calls, then one step."""

    core: EngineCore
    events: list[Event] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    posted: deque[Callable[[Engine], None]] = field(default_factory=deque)
    sender: ScriptedSender = field(default_factory=ScriptedSender)
    ended: bool = False

    def __post_init__(self) -> None:
        self.worker = PrefillWorker(self.core, self.posted.append, self.posted.append, lambda: 0.0)
        self.worker.use(self.sender)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def turn(self) -> None:
        while self.posted:
            self.posted.popleft()(self.core)
        result = self.core.step(self.worker.on_layer)
        self.tokens.extend(result.tokens)
        for prefilled in result.prefilled:
            self.worker.on_prefilled(prefilled)
        for prompt_id, error in result.failed:
            self.worker.on_failed(prompt_id, error)

    def turn_until_idle(self) -> None:
        self.turn()
        while self.posted or self.core.has_work():
            self.turn()


@contextmanager
def half() -> Iterator[Half]:
    with engine() as (core, _):
        yield Half(core)


def test_a_link_failing_before_the_prompt_starts_holds_nothing() -> None:
    with half() as it:
        it.sender.on_begin = lambda ticket: it.worker.failed(ticket.ticket_id, InstanceLost("nobody listens"))
        it.worker.accept(it, prompt("p", 9), ticket_for(prompt("p", 9)))
        it.turn_until_idle()

        assert it.events == [Failed("p", "InstanceLost", "nobody listens")]
        assert (it.core.blocks.num_used, it.core.load().held_prompts) == (0, 0)


def test_a_prompt_may_return_after_its_ticket_failed_to_begin() -> None:
    def no_thread(_: Ticket) -> None:
        raise RuntimeError("can't start new thread")

    with half() as it:
        it.sender.on_begin = no_thread
        with pytest.raises(RuntimeError, match="can't start new thread"):
            it.worker.accept(it, prompt("p", 9), ticket_for(prompt("p", 9)))
        it.turn_until_idle()

        assert it.worker.owner_of("p") is None
        assert ("abort", ticket_for(prompt("p", 9)).ticket_id) in it.sender.messages
        assert (it.events, it.core.load().held_prompts) == ([], 0)
        it.sender.on_begin = lambda _: None
        it.worker.accept(it, prompt("p", 9), ticket_for(prompt("p", 9), 2))
        it.turn_until_idle()
        it.worker.acked(ticket_for(prompt("p", 9), 2).ticket_id, STATS)
        it.turn_until_idle()
        assert [type(event) for event in it.events] == [HandedOff]


def test_a_ticket_that_failed_to_begin_is_reported_once() -> None:
    with half() as it:

        def fail_twice(ticket: Ticket) -> None:
            it.worker.failed(ticket.ticket_id, InstanceLost("nobody listens"))
            raise RuntimeError("can't start new thread")

        it.sender.on_begin = fail_twice
        it.worker.accept(it, prompt("p", 9), ticket_for(prompt("p", 9)))
        it.turn_until_idle()

        assert it.events == [Failed("p", "InstanceLost", "nobody listens")]
        assert it.core.blocks.num_used == 0


ENDINGS = ("failed", "cancel", "failed and cancel", "acked", "acked and cancel")
COMMITTED_AFTER = 2  # turns; only then can an ack come


@pytest.mark.parametrize(
    ("ending", "turns"), [(e, t) for e in ENDINGS for t in range(4) if "acked" not in e or t >= COMMITTED_AFTER]
)
def test_every_finish_at_any_time_frees_blocks_and_is_sent_once(ending: str, turns: int) -> None:
    with half() as it:
        state, ticket = prompt("p", 40), ticket_for(prompt("p", 40))
        it.worker.accept(it, state, ticket)
        for _ in range(turns):
            it.turn()
        if "acked" in ending:
            it.worker.acked(ticket.ticket_id, STATS)
        if "failed" in ending:
            it.worker.failed(ticket.ticket_id, InstanceLost("gone"))
        if "cancel" in ending:
            it.worker.cancel(it, "p", "enough")
        it.turn_until_idle()

        assert len(it.events) == 1
        assert isinstance(it.events[0], HandedOff if "acked" in ending else Failed)
        assert (it.core.blocks.num_used, it.core.load().held_prompts) == (0, 0)


def test_a_duplicate_prompt_is_refused_and_the_first_continues() -> None:
    with half() as it:
        state = prompt("p", 9)
        it.worker.accept(it, state, ticket_for(state, 1))
        with pytest.raises(InvalidRequest, match="p"):
            it.worker.accept(it, state, ticket_for(state, 2))
        it.turn_until_idle()
        it.worker.acked(ticket_for(state, 1).ticket_id, STATS)
        it.turn_until_idle()

        assert [type(event) for event in it.events] == [HandedOff]
        assert it.core.blocks.num_used == 0


def test_a_prompt_with_a_first_token_commits_that_token() -> None:
    with half() as it:
        state = replace(prompt("p", 40), outputs=((7,),))
        it.worker.accept(it, state, ticket_for(state))
        it.turn_until_idle()
        it.worker.acked(ticket_for(state).ticket_id, STATS)
        it.turn_until_idle()

        assert it.tokens == []
        assert [read_prompt(description) for description in it.sender.descriptions] == [state]
        assert [type(event) for event in it.events] == [HandedOff]
        assert it.core.blocks.num_used == 0


def test_finished_kv_uses_at_most_half_the_pool_until_acked() -> None:
    with half() as it:  # 64 blocks of 4 tokens
        states = [prompt(name, 40) for name in "abcde"]
        for number, state in enumerate(states[:4]):
            it.worker.accept(it, state, ticket_for(state, number))
            it.turn_until_idle()
        assert it.core.load().held_prompts == 4

        with pytest.raises(NoCapacity, match=r"finished prompts \(4\) .* hold 40 of 64 KV blocks, and the limit is 32"):
            it.worker.accept(it, states[4], ticket_for(states[4], 4))
        assert ("begin", f"{4:032x}") not in it.sender.messages
        it.worker.acked(ticket_for(states[0], 0).ticket_id, STATS)
        it.turn_until_idle()
        it.worker.accept(it, states[4], ticket_for(states[4], 4))
        it.turn_until_idle()

        assert it.core.load().held_prompts == 4
        it.worker.cancel_all(it, "enough")
        it.turn_until_idle()
        assert it.core.blocks.num_used == 0


def test_queued_prompts_hold_no_kv_and_a_probe_is_admitted() -> None:
    with half() as it:
        for number, name in enumerate("abcd"):
            it.worker.accept(it, prompt(name, 40), ticket_for(prompt(name, 40), number))
        it.turn_until_idle()
        probe = replace(prompt("probe", 4), probe=True)
        it.worker.accept(it, probe, ticket_for(probe, 9))
        it.turn_until_idle()

        assert it.core.load().held_prompts == 5
        it.worker.cancel_all(it, "enough")
        it.turn_until_idle()


@pytest.mark.parametrize("ending", ["cancel", "failed"])
def test_a_prompt_finished_twice_at_once_is_reported_once(ending: str) -> None:
    with half() as it:
        state = prompt("p", 9, max_tokens=1)
        it.worker.accept(it, state, ticket_for(state))

        def ends_first(prompt_id: str, forget: Callable[[str], object] = it.worker._pop_hand_off) -> object:
            it.worker._pop_hand_off = forget  # type: ignore[assignment,method-assign]
            if ending == "cancel":
                it.worker.cancel(it, "p", "enough")
            else:
                it.worker.failed(ticket_for(state).ticket_id, InstanceLost("gone"))
            return forget(prompt_id)

        it.worker._pop_hand_off = ends_first  # type: ignore[assignment,method-assign]
        it.turn_until_idle()

        assert [type(event) for event in it.events] == [Failed]
        assert it.core.blocks.num_used == 0


def test_a_commit_that_raises_ends_only_its_own_prompt() -> None:
    def break_down(ticket_id: str) -> None:
        if ticket_id == f"{1:032x}":
            raise RuntimeError("a defect")

    with half() as it:
        it.sender.on_commit = break_down
        for number, name in ((1, "a"), (2, "b")):
            it.worker.accept(it, prompt(name, 9), ticket_for(prompt(name, 9), number))
        it.turn_until_idle()

        assert it.events == [Failed("a", "InternalError", "a defect")]
        assert ("abort", f"{1:032x}") in it.sender.messages
        assert ("commit", f"{2:032x}") in it.sender.messages
        assert it.core.load().held_prompts == 1
        it.worker.acked(f"{2:032x}", STATS)
        it.turn_until_idle()
        assert it.core.blocks.num_used == 0


def test_a_prompt_refused_by_the_engine_ends_with_its_ticket() -> None:
    with half() as it:
        state = prompt("p", 9)
        it.core.add(state)
        it.worker.accept(it, state, ticket_for(state))
        it.turn_until_idle()

        (failed,) = it.events
        assert isinstance(failed, Failed)
        assert "is already" in failed.message
        assert ("abort", ticket_for(state).ticket_id) in it.sender.messages


def test_a_prompt_that_raises_in_the_engine_ends_with_its_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise IndexError("a defect")

    with half() as it:
        monkeypatch.setattr(it.core, "add", break_down)
        it.worker.accept(it, prompt("p", 9), ticket_for(prompt("p", 9)))
        it.turn()

        assert it.events == [Failed("p", "InternalError", "a defect")]
        assert ("abort", ticket_for(prompt("p", 9)).ticket_id) in it.sender.messages
        assert it.worker.owner_of("p") is None


def test_a_pooling_prompt_is_refused_before_it_begins() -> None:
    with half() as it:
        state = replace(prompt("p", 9), pooling=Pooling("embed"))
        with pytest.raises(InvalidRequest, match="prompt p requests pooling, which has no KV hand-off"):
            it.worker.accept(it, state, ticket_for(state))

        assert it.sender.messages == []
        assert it.worker.owner_of("p") is None


def test_cancelling_a_prompt_does_not_end_the_next_of_the_same_id() -> None:
    with half() as it:
        state = prompt("p", 9)
        it.worker.accept(it, state, ticket_for(state, 1))
        it.worker.cancel(it, "p", "again")
        it.worker.accept(it, state, ticket_for(state, 2))
        it.turn_until_idle()

        assert [type(event) for event in it.events] == [Failed]
        assert it.core.load().held_prompts == 1
        it.worker.acked(ticket_for(state, 2).ticket_id, STATS)
        it.turn_until_idle()
        assert it.core.blocks.num_used == 0
