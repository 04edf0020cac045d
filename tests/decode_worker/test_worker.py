"""The decode half under every order of its callers: blocks are freed, and each prompt finishes once."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from decode_worker.worker import DecodeWorker
from engine.core import EngineCore
from engine.interface import Engine
from tests.engine.fake_engines import CONFIG, engine, prompt, wanted
from wire.convert import describe_prompt
from wire.errors import HandoffFailed, InvalidRequest
from wire.messages import Event, Failed, Refused, Reserved
from wire.types import Beam, BeamSearch, FinishReason, KvEndpoint, PromptState, Ticket, TokenOutput

STATE = prompt("d", 9)
GIVEN = replace(STATE, outputs=((wanted(STATE)[0],),))
RESERVE = STATE
A_MOMENT_S = 0.2  # how long to wait for a thread that must stay blocked


@dataclass
class ScriptedReceiver:
    """A receiver whose tickets the test ends; `abort` ends one on the caller's thread, as in the real one."""

    ended: Callable[[str, tuple[int, ...], str], None]
    tickets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ends_at_once: bool = False
    bytes_received: int = 0
    endpoints: tuple[KvEndpoint, ...] = ()

    def open(self, ticket_id: str, *, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> Ticket:
        self.tickets[ticket_id] = tuple(block_ids)
        if self.ends_at_once:
            self.abort(ticket_id, "another rank is gone")
        return Ticket(ticket_id, 1, "decode-0", num_tokens, first_token, 10.0, ())

    def abort(self, ticket_id: str, reason: str) -> None:
        block_ids = self.tickets.pop(ticket_id, None)
        if block_ids is not None:
            self.ended(ticket_id, block_ids, reason)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(eq=False)
class Half:
    """A decode half over a real engine that the test drives: `turn` runs the posted calls, then one step."""

    core: EngineCore
    events: list[Event] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    posted: deque[Callable[[Engine], None]] = field(default_factory=deque)
    ended: bool = False

    def __post_init__(self) -> None:
        self.worker = DecodeWorker(self.core, self.post, self.post, lambda: 0.0)
        self.receiver = ScriptedReceiver(self.worker.ended)
        self.worker.use(self.receiver)

    def post(self, work: Callable[[Engine], None]) -> None:
        self.posted.append(work)

    def send_tokens(self, tokens: Iterable[TokenOutput]) -> None:
        tokens = tuple(tokens)
        self.worker.on_tokens(tokens)
        self.tokens.extend(tokens)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def turn(self) -> None:
        while self.posted:
            self.posted.popleft()(self.core)
        result = self.core.step()
        self.send_tokens(result.tokens)
        for prompt_id, error in result.failed:
            self.worker.on_failed(prompt_id, error)

    def turn_until_idle(self) -> None:
        self.turn()
        while self.posted or self.core.has_work():
            self.turn()

    def reserve(self) -> str:
        self.worker.reserve(self, RESERVE)
        reserved = self.events[-1]
        assert isinstance(reserved, Reserved)
        return reserved.ticket.ticket_id

    def commit(self, ticket_id: str, state: PromptState = GIVEN) -> None:
        """Call `committed` as a receiver does: an error that it raises ends the ticket."""
        block_ids = self.receiver.tickets.pop(ticket_id)
        try:
            self.worker.committed(ticket_id, describe_prompt(state), block_ids, 1)
        except HandoffFailed as error:
            self.worker.ended(ticket_id, block_ids, str(error))

    def cancel(self) -> None:
        self.worker.cancel(self, "d", None, "enough", self.send_tokens)

    @property
    def finishes(self) -> list[FinishReason]:
        return [token.finish for token in self.tokens if token.finish is not None]

    def assert_ended_once(self) -> None:
        failures = [event for event in self.events if isinstance(event, Failed)]
        assert len(failures) + len(self.finishes) == 1, (failures, self.finishes)
        assert (self.core.blocks.num_used, self.core.load().running) == (0, 0)


@contextmanager
def half() -> Iterator[Half]:
    with engine() as (core, _):
        yield Half(core)


def test_a_committed_prompt_generates_to_its_end_and_is_forgotten() -> None:
    with half() as it:
        it.commit(it.reserve())
        it.turn_until_idle()
        it.cancel()

        it.assert_ended_once()
        assert it.finishes == [FinishReason.LENGTH]


def test_a_ticket_that_ends_during_its_creation_is_not_reserved() -> None:
    with half() as it:
        it.receiver.ends_at_once = True
        it.worker.reserve(it, RESERVE)

        assert it.events == [Failed("d", "HandoffFailed", "another rank is gone")]
        assert it.core.blocks.num_used == 0


def test_a_cancel_between_commit_and_admission_ends_the_prompt() -> None:
    with half() as it:
        ticket_id = it.reserve()
        posts = it.worker._post
        canceller = threading.Thread(target=it.cancel)

        def post_late(work: Callable[[Engine], None]) -> None:
            if threading.current_thread() is not canceller and canceller.ident is None:
                canceller.start()
                canceller.join(A_MOMENT_S)  # runs its own work first, unless it is blocked
            posts(work)

        it.worker._post = post_late
        it.commit(ticket_id)
        canceller.join()
        it.turn_until_idle()

        it.assert_ended_once()
        assert it.finishes == [FinishReason.CANCELLED]


@pytest.mark.parametrize("order", ["cancel, commit", "cancel, end", "end, cancel", "commit, turn, cancel", "cancel"])
def test_every_order_of_finishes_frees_blocks_and_is_reported_once(order: str) -> None:
    with half() as it:
        ticket_id = it.reserve()
        block_ids = it.receiver.tickets[ticket_id]
        for what in order.split(", "):
            match what:
                case "cancel":
                    it.cancel()
                case "commit" if ticket_id in it.receiver.tickets:
                    it.commit(ticket_id)
                case "end" if it.receiver.tickets.pop(ticket_id, None):
                    it.worker.ended(ticket_id, block_ids, "the sender is gone")
                case "turn":
                    it.turn()
        it.turn_until_idle()

        it.assert_ended_once()


def test_a_commit_of_another_prompt_than_reserved_is_refused() -> None:
    with half() as it:
        it.commit(it.reserve(), replace(GIVEN, token_ids=(1, 2, 3)))
        it.turn_until_idle()

        it.assert_ended_once()


def test_an_unreadable_commit_fails_the_hand_off_not_the_request() -> None:
    with half() as it:
        ticket_id = it.reserve()

        with pytest.raises(HandoffFailed, match="cannot be read"):
            it.worker.committed(ticket_id, describe_prompt(GIVEN)[:-1], it.receiver.tickets[ticket_id], 1)

        it.worker.ended(ticket_id, it.receiver.tickets[ticket_id], "it cannot be read")
        it.assert_ended_once()


@pytest.mark.parametrize("error", [InvalidRequest("no"), RuntimeError("a defect")])
def test_an_admission_that_raises_fails_its_prompt_and_frees_blocks(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    with half() as it:
        monkeypatch.setattr(it.core, "admit", refuse)
        it.commit(it.reserve())
        it.turn_until_idle()
        it.cancel()

        it.assert_ended_once()
        assert str(error) in str(it.events[-1])


def test_a_duplicate_prompt_is_refused_and_the_first_continues() -> None:
    with half() as it:
        ticket_id = it.reserve()
        it.worker.reserve(it, RESERVE)
        with pytest.raises(InvalidRequest, match="d"):
            it.worker.generate(it, STATE)
        it.commit(ticket_id)
        it.worker.reserve(it, RESERVE)
        with pytest.raises(InvalidRequest, match="d"):
            it.worker.generate(it, STATE)
        it.turn_until_idle()

        assert [type(event) for event in it.events] == [Reserved, Refused, Refused]
        it.assert_ended_once()


def test_a_prompt_the_engine_refuses_fails_with_a_reason() -> None:
    with half() as it:
        it.core.add(STATE, hold=True)
        it.worker.generate(it, STATE)
        it.turn()

        (failed,) = it.events
        assert isinstance(failed, Failed)
        assert "is already" in failed.message
        it.core.release("d")


def test_a_prompt_that_raises_in_the_engine_fails_and_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise IndexError("a defect")

    with half() as it:
        monkeypatch.setattr(it.core, "add", break_down)
        it.worker.generate(it, STATE)
        it.turn()

        assert it.events == [Failed("d", "InternalError", "a defect")]
        assert it.worker.owner_of("d") is None


@pytest.mark.parametrize("given", [((), ()), ((1, 2, 7), (3, 4)), ((1, 2, 7),), ((1, 2),), ((3, 4), (1, 2, 7))])
def test_a_resumed_prompt_is_forgotten_after_its_last_sequence(given: tuple[tuple[int, ...], ...]) -> None:
    with half() as it:
        it.worker.generate(it, replace(prompt("d", 9, 6, n=2, stop_token_ids=(7,)), outputs=given))
        it.turn()
        assert it.worker.owner_of("d") is it
        it.turn_until_idle()

        assert len(it.finishes) == sum(7 not in output for output in given) + 2 - len(given)
        assert it.worker.owner_of("d") is None


def test_a_beam_search_is_forgotten_once_its_hypotheses_are_sent() -> None:
    params = {"n": 2, "best_of": 3, "stop_token_ids": (7,), "beam_search": BeamSearch()}
    beams = (Beam((1, 2), -1.0), Beam((3, 4), -1.5), Beam((5, 6), -2.0), Beam((1, 7), -3.0, True, 7))
    with half() as it:
        it.worker.generate(it, replace(prompt("d", 9, 6, **params), beams=beams))
        it.turn()
        assert it.worker.owner_of("d") is it
        it.turn_until_idle()

        assert len(it.finishes) == 2
        assert it.worker.owner_of("d") is None


def test_a_reservation_the_receiver_cannot_open_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(ticket_id: str, **_: object) -> Ticket:
        raise ValueError("no such slots")

    with half() as it:
        monkeypatch.setattr(it.receiver, "open", fail)
        with pytest.raises(ValueError, match="no such slots"):
            it.worker.reserve(it, RESERVE)
        assert it.core.blocks.num_used == 0
        monkeypatch.undo()
        it.reserve()
        it.cancel()

        it.assert_ended_once()


def test_a_probe_is_admitted_while_prompts_wait_for_blocks() -> None:
    with half() as it:
        it.core.add(prompt("large", 90))
        it.core.add(prompt("waits", 40))
        it.core.step()
        assert it.core.load().waiting == 1
        it.worker.reserve(it, RESERVE)
        it.worker.reserve(it, replace(RESERVE, prompt_id="probe", token_ids=(1, 2, 3, 4), probe=True))

        assert [type(event) for event in it.events] == [Refused, Reserved]
        assert isinstance(it.events[0], Refused)
        assert it.events[0].error == "NoCapacity"
        it.worker.cancel(it, "probe", None, "enough", it.send_tokens)
        it.core.cancel("large")
        it.core.cancel("waits")


def test_a_prompt_larger_than_the_pool_is_refused_by_name() -> None:
    with half() as it:
        it.worker.reserve(it, replace(RESERVE, token_ids=(1,) * (CONFIG.num_blocks * CONFIG.block_size + 1)))

        (refused,) = it.events
        assert isinstance(refused, Refused)
        assert refused.error == "NeverFits"


def test_of_two_schedulers_at_a_full_pool_the_refused_one_is_next() -> None:
    class Other:
        ended = False

        def __init__(self) -> None:
            self.events: list[Event] = []

        def emit(self, event: Event) -> None:
            self.events.append(event)

    other, half_of_it = Other(), (1,) * (CONFIG.num_blocks * CONFIG.block_size // 2 + 1)
    with half() as it:
        states = [replace(prompt(name, 1), token_ids=half_of_it) for name in ("x", "y", "z")]
        it.worker.reserve(it, states[0])
        it.worker.reserve(other, states[1])
        it.worker.cancel(it, "x", None, "enough", it.send_tokens)
        it.worker.reserve(it, states[2])
        assert isinstance(it.events[-1], Refused)
        assert "another scheduler" in it.events[-1].message
        it.worker.reserve(other, states[1])
        assert [type(event) for event in other.events] == [Refused, Reserved]
        it.worker.cancel_all(other, "it is gone")
        it.worker.reserve(it, states[2])
        assert isinstance(it.events[-1], Reserved)
        it.worker.cancel_all(it, "enough")
