"""After a session ends, no event of its prompts is sent, and no state of them is left."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from engine.core import EngineCore
from engine.interface import Engine
from instance.workers import Workers
from tests.decode_worker.test_worker import A_MOMENT_S, GIVEN, RESERVE, ScriptedReceiver
from tests.engine.fake_engines import CONFIG, engine, prompt
from tests.prefill_worker.test_worker import ScriptedSender, ticket_for
from wire.convert import describe_prompt
from wire.load import LoadSnapshot
from wire.messages import Cancel, Event, Failed, Reserved, Step
from wire.types import StageTimes


@dataclass(eq=False)
class Both:
    """Both halves over a real engine that the test drives."""

    core: EngineCore
    events: list[Event] = field(default_factory=list)
    posted: deque[Callable[[Engine], None]] = field(default_factory=deque)
    on_load: Callable[[], object] = lambda: None
    on_emit: Callable[[Event], object] = lambda _: None
    ended: bool = False

    def __post_init__(self) -> None:
        self.workers = Workers(self.core, self.posted.append, self.load, lambda: 0.0)
        self.workers.prefill.use(ScriptedSender())
        self.receiver = ScriptedReceiver(self.workers.decode.ended)
        self.workers.decode.use(self.receiver)

    def emit(self, event: Event) -> None:
        self.on_emit(event)
        self.events.append(event)

    def load(self) -> LoadSnapshot:
        self.on_load()
        return LoadSnapshot(blocks_total=1)

    def turn(self) -> None:
        while self.posted:
            self.posted.popleft()(self.core)
        self.workers.on_step(self.core.step())

    def turn_until_idle(self) -> None:
        self.turn()
        while self.posted or self.core.has_work():
            self.turn()


@contextmanager
def open_instance() -> Iterator[Both]:
    with engine() as (core, _):
        yield Both(core)


def start_prompts(instance: Both) -> None:
    """Leave one prompt of each kind running."""
    instance.workers.decode.reserve(instance, RESERVE)
    reserved = instance.events[-1]
    assert isinstance(reserved, Reserved)
    block_ids = instance.receiver.tickets.pop(reserved.ticket.ticket_id)
    instance.workers.decode.committed(reserved.ticket.ticket_id, describe_prompt(GIVEN), block_ids, 1)
    instance.workers.decode.generate(instance, prompt("whole", 5))
    instance.workers.prefill.accept(instance, prompt("held", 5), ticket_for(prompt("held", 5)))
    instance.turn()
    instance.workers.decode.reserve(instance, prompt("reserved", 3))


def test_finishes_of_an_ended_session_are_not_sent_to_the_next() -> None:
    with open_instance() as instance:
        start_prompts(instance)
        instance.workers.cancel_all(instance, "the session is over")
        instance.events.clear()  # from here on events go to the next session
        instance.turn_until_idle()

        assert instance.events == []
        assert (instance.core.blocks.num_used, instance.core.load().running, instance.core.load().held_prompts) == (
            0,
            0,
            0,
        )


def test_a_step_running_when_a_session_ends_is_not_sent_to_the_next() -> None:
    with open_instance() as instance:
        start_prompts(instance)
        result = instance.core.step()
        instance.workers.cancel_all(instance, "the session is over")
        instance.events.clear()
        instance.workers.on_step(result)
        instance.turn_until_idle()

        assert result.tokens
        assert instance.events == []


def test_a_commit_pending_when_the_session_ends_frees_its_blocks() -> None:
    with open_instance() as instance:
        instance.workers.decode.reserve(instance, RESERVE)
        (ticket_id,) = instance.receiver.tickets
        instance.workers.decode.committed(
            ticket_id, describe_prompt(GIVEN), instance.receiver.tickets.pop(ticket_id), 1
        )
        instance.workers.cancel_all(instance, "the session is over")
        instance.turn_until_idle()

        assert instance.core.blocks.num_used == 0


def test_no_event_follows_a_prompts_finish() -> None:
    with open_instance() as instance:
        instance.workers.prefill.accept(instance, prompt("held", 5), ticket_for(prompt("held", 5)))
        while instance.posted:
            instance.posted.popleft()(instance.core)
        result = instance.core.step()
        instance.workers.cancel(instance, Cancel("held"))
        instance.workers.on_step(result)
        instance.turn_until_idle()

        assert [type(event) for event in instance.events] == [Failed]
        assert instance.core.blocks.num_used == 0


def test_no_event_follows_a_prompt_ended_while_a_step_is_built() -> None:
    with open_instance() as instance:
        instance.workers.prefill.accept(instance, prompt("held", 5), ticket_for(prompt("held", 5)))
        instance.on_load = lambda: instance.workers.cancel(instance, Cancel("held"))
        instance.turn_until_idle()

        assert [type(event) for event in instance.events] == [Failed]


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_a_finish_waits_until_the_step_before_it_is_reported(half: str) -> None:
    threads: list[threading.Thread] = []
    with open_instance() as instance:
        if half == "prefill":
            instance.workers.prefill.accept(instance, prompt("it", 5), ticket_for(prompt("it", 5)))
        else:
            instance.workers.decode.generate(instance, prompt("it", 5))

        def end_meanwhile(event: Event) -> None:
            if isinstance(event, Step) and not threads:
                threads.append(
                    threading.Thread(target=getattr(instance.workers, half).cancel_all, args=(instance, "it is over"))
                )
                threads[0].start()
                threads[0].join(A_MOMENT_S)
                assert threads[0].is_alive(), f"it ended before {event} was sent"

        instance.on_emit = end_meanwhile
        instance.turn()
        threads[0].join()
        instance.turn_until_idle()

        assert [type(event) for event in instance.events] == ([Step, Failed] if half == "prefill" else [Step])


def test_a_cancel_is_answered_after_the_prompts_last_tokens() -> None:
    with open_instance() as instance:
        instance.workers.decode.generate(instance, prompt("whole", 5))
        instance.turn()
        instance.workers.cancel(instance, Cancel("whole"))
        instance.turn_until_idle()

        tokens = [token for event in instance.events if isinstance(event, Step) for token in event.tokens]
        assert [token.finish for token in tokens][-1] == "cancelled"
        assert [token.index for token in tokens] == [0, 1]


def test_a_local_prompt_reports_its_compute_time_once() -> None:
    with open_instance() as instance:
        instance.workers.decode.generate(instance, prompt("whole", 5, max_tokens=4))
        instance.turn_until_idle()

    reported = [entry for event in instance.events if isinstance(event, Step) for entry in event.times]
    assert [(prompt_id, times.prefill_s is not None) for prompt_id, times in reported] == [("whole", True)]
    assert isinstance(instance.events[0], Step)
    assert instance.events[0].times, "the compute time must come with the first token"


def test_preemptions_of_a_prompt_between_two_tokens_are_reported() -> None:
    with engine(replace(CONFIG, num_blocks=12), swap_bytes=1 << 20) as (core, _):
        instance = Both(core)
        for name in ("old", "young"):
            instance.workers.decode.generate(instance, prompt(name, 6, max_tokens=30))
        instance.turn_until_idle()
        reported = [entry for event in instance.events if isinstance(event, Step) for entry in event.times]

        assert core.load().preemptions == 1
        assert [entry for entry in reported if entry[1].num_swaps] == [("young", StageTimes(num_swaps=1))]
