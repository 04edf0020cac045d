"""A pair fails before its decode instance emits a token: the client gets the answer once, as without the fault."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from simulation.instance import SimulatedInstance
from simulation.prompt import SimulatedPrompt
from tests.scheduler.fake_cluster import Answer, FakeCluster, collect, expected, request
from tests.scheduler.virtual_time import until, virtual
from wire.description import InstanceDescription
from wire.errors import DeadlineExceeded, InstanceLost
from wire.event_sink import EventSink
from wire.messages import Cancel, Event, Failed, HandedOff, Prefill, Reserve, Step
from wire.types import FinishReason, Role

PROMPT = (5, 6, 7)
LOST = "the link to its peer broke"
FULL = "no room for the sequences"


class Linked(SimulatedInstance):
    """Reports its next hand-offs as a broken link: `lost_acks` after D committed, `fail_handoffs` before.

    With `finds_no_room` the latter are reported as lack of room on D.
    """

    lost_acks = 0
    finds_no_room = False

    def _emit(self, session: EventSink, event: Event) -> None:
        if isinstance(event, HandedOff) and self.lost_acks:
            self.lost_acks -= 1
            event = Failed(event.prompt_id, "InstanceLost", LOST)
        elif isinstance(event, Failed) and event.error == "HandoffFailed" and event.message == "set to fail":
            reported = ("NoCapacity", FULL) if self.finds_no_room else ("InstanceLost", LOST)
            event = Failed(event.prompt_id, *reported)
        super()._emit(session, event)


@asynccontextmanager
async def linked(roles: str) -> AsyncIterator[tuple[FakeCluster, list[Linked]]]:
    """Run a cluster whose instances are Linked."""
    cluster = FakeCluster(roles)
    cluster.kind = Linked
    async with cluster.serving():
        yield cluster, [instance for instance in cluster.instances if isinstance(instance, Linked)]


def assert_whole(cluster: FakeCluster, answer: Answer, count: int, *, retried: int) -> None:
    """The answer is the one without faults, it ended once, and nothing is left."""
    assert answer.tokens == {(0, 0): expected(PROMPT, count)}
    assert answer.finishes == {(0, 0): FinishReason.LENGTH}
    ledger = cluster.control.dispatch.ledger
    assert (ledger.completed, ledger.failed, ledger.inflight) == (1, 0, 0)
    assert ledger.retried_prompts == retried
    assert [done.tries for done in answer.done.values()] == [1 + retried]
    assert set(cluster.blocks_used) == {0}


@pytest.mark.parametrize("first_step_s", [0.001, 0.5, 1.5])
@virtual
async def test_an_ack_lost_after_decode_committed_needs_no_retry(first_step_s: float) -> None:
    async with linked("PD") as (cluster, (prefill, decode)):
        prefill.lost_acks = 1
        decode.behaviour.step_s = first_step_s

        answer = await collect(cluster.control.dispatch, request(PROMPT, max_tokens=6))

        assert_whole(cluster, answer, 6, retried=0)
        assert not any(isinstance(command, Cancel) for command in decode.commands)


@virtual
async def test_a_decode_instance_silent_about_its_commit_is_left_in_time() -> None:
    async with linked("PDD") as (cluster, (prefill, decode, other)):
        prefill.lost_acks = 1
        decode.behaviour.lag_s = 60.0
        began = asyncio.get_running_loop().time()

        answer = await collect(cluster.control.dispatch, request(PROMPT))

        assert answer.done[0].decode_instance == other.description.instance_id
        assert asyncio.get_running_loop().time() - began < 10.0
        await until(lambda: set(cluster.blocks_used) == {0})
        assert_whole(cluster, answer, 4, retried=1)


@pytest.mark.parametrize("roles", ["PD", "PPDD"])
@virtual
async def test_a_broken_link_before_commit_is_retried_after_the_first_token(roles: str) -> None:
    async with linked(roles) as (cluster, instances):
        instances[0].behaviour.fail_handoffs = 1

        answer = await collect(cluster.control.dispatch, request(PROMPT))

        assert_whole(cluster, answer, 4, retried=1)
        prefills = [c.prompt for one in instances for c in one.commands if isinstance(c, Prefill)]
        assert [prompt.outputs for prompt in prefills] == [(), (tuple(expected(PROMPT, 1)),)]


@virtual
async def test_finished_sequences_stay_finished_in_the_second_attempt() -> None:
    stop_id = expected(PROMPT, 1, sequence=1)[0]
    async with linked("PD") as (cluster, (prefill, _)):
        prefill.behaviour.fail_handoffs = 1

        answer = await collect(cluster.control.dispatch, request(PROMPT, n=3, stop_token_ids=(stop_id,)))

        assert answer.tokens == {
            (0, 0): expected(PROMPT, 4, 0),
            (0, 1): [stop_id],
            (0, 2): expected(PROMPT, 4, 2),
        }
        assert set(cluster.blocks_used) == {0}


@virtual
async def test_a_link_broken_before_the_first_token_is_retried_on_the_pair() -> None:
    async with linked("PD") as (cluster, (prefill, _)):
        prefill.behaviour.step_s = 0.2
        reader = asyncio.create_task(collect(cluster.control.dispatch, request(PROMPT)))
        await until(lambda: any(prompt.stage == "waiting" for prompt in prefill.prompts.values()))
        (prompt,) = prefill.prompts.values()
        prefill._fail(prompt, InstanceLost(LOST))

        assert_whole(cluster, await reader, 4, retried=1)
        assert sum(isinstance(command, Prefill) for command in prefill.commands) == 2


@virtual
async def test_a_link_that_never_works_fails_the_request_after_two_tries() -> None:
    async with linked("PD") as (cluster, (prefill, _)):
        prefill.behaviour.fail_handoffs = 99

        with pytest.raises(InstanceLost, match=r"(prefill|decode)-0: its link to the other instance broke$"):
            await collect(cluster.control.dispatch, request(PROMPT))

        assert sum(isinstance(command, Prefill) for command in prefill.commands) == 2
        await until(lambda: set(cluster.blocks_used) == {0})


@virtual
async def test_a_dead_pair_is_not_waited_for_by_its_requests() -> None:
    async with linked("PD") as (cluster, (prefill, _)):
        prefill.behaviour.step_s = 1.0
        reader = asyncio.create_task(collect(cluster.control.dispatch, request(PROMPT)))
        await until(lambda: any(prompt.stage == "waiting" for prompt in prefill.prompts.values()))
        cluster.kill(0)

        with pytest.raises(InstanceLost, match="prefill-0 was lost"):
            await reader


@virtual
async def test_decode_killed_before_its_first_token_is_replaced() -> None:
    async with linked("PDD") as (cluster, (_, decode, other)):
        decode.behaviour.step_s = 1.0
        reader = asyncio.create_task(collect(cluster.control.dispatch, request(PROMPT)))
        await until(lambda: any(prompt.stage == "decoding" for prompt in decode.prompts.values()))
        cluster.kill(1)

        answer = await reader
        await until(lambda: set(cluster.blocks_used) == {0})
        assert_whole(cluster, answer, 4, retried=1)
        assert answer.done[0].decode_instance == other.description.instance_id


@pytest.mark.parametrize("refusals", [1, 5])
@virtual
async def test_refusals_for_lack_of_room_use_up_no_try(refusals: int) -> None:
    async with linked("PD") as (cluster, (prefill, decode)):
        decode.behaviour.refuse.extend(["NoCapacity"] * refusals)
        prefill.behaviour.fail_handoffs = 1

        answer = await collect(cluster.control.dispatch, request(PROMPT))

        assert_whole(cluster, answer, 4, retried=1)


@virtual
async def test_a_failure_after_a_refusal_is_retried_twice_and_no_more() -> None:
    async with linked("PD") as (cluster, (prefill, decode)):
        decode.behaviour.refuse.append("NoCapacity")
        prefill.behaviour.fail_handoffs = 99

        with pytest.raises(InstanceLost):
            await collect(cluster.control.dispatch, request(PROMPT))

        assert sum(isinstance(command, Prefill) for command in prefill.commands) == 2
        await until(lambda: set(cluster.blocks_used) == {0})


@virtual
async def test_lack_of_room_before_the_first_token_ends_at_the_limit() -> None:
    async with linked("PD") as (cluster, (_, decode)):
        decode.behaviour.refuse.extend(["NoCapacity"] * 999)

        async with asyncio.timeout(300.0):
            with pytest.raises(DeadlineExceeded, match="no first token within 30 s"):
                await collect(cluster.control.dispatch, request(PROMPT))

        assert sum(isinstance(command, Reserve) for command in decode.commands) <= 35  # once a heartbeat


@virtual
async def test_lack_of_room_after_the_first_token_ends_at_the_limit_too() -> None:
    async with linked("PD") as (cluster, (prefill, decode)):
        prefill.finds_no_room = decode.finds_no_room = True
        prefill.behaviour.fail_handoffs = 999

        async with asyncio.timeout(300.0):
            with pytest.raises(DeadlineExceeded, match="no progress for 10 s"):
                await collect(cluster.control.dispatch, request(PROMPT))

        assert cluster.control.dispatch.ledger.retried_prompts == 0
        await until(lambda: set(cluster.blocks_used) == {0})


class GivesUp(SimulatedInstance):
    """Has no room on D for a sequence before each third token of its output, once."""

    given_up = frozenset[int]()

    def _emit(self, session: EventSink, event: Event) -> None:
        if isinstance(event, Step) and self.description.role is Role.DECODE:
            for token in event.tokens:
                if token.index % 3 == 2 and token.index not in self.given_up:
                    self.given_up |= {token.index}
                    self._drop(self.prompts[token.prompt_id])
                    event = Failed(token.prompt_id, "NoCapacity", FULL)
        super()._emit(session, event)


@virtual
async def test_lack_of_room_between_tokens_does_not_add_up() -> None:
    cluster = FakeCluster("PD")
    cluster.kind = GivesUp
    async with cluster.serving():
        cluster.instances[1].behaviour.step_s = 1.5
        answer = await collect(cluster.control.dispatch, request(PROMPT, max_tokens=16))

        assert_whole(cluster, answer, 16, retried=0)


class EachOnce(Linked):
    """Fails the first hand-off of each prompt, recognised by its tokens."""

    def __init__(self, description: InstanceDescription, peers: dict[str, SimulatedInstance]) -> None:
        super().__init__(description, peers)
        self.failed: set[tuple[int, ...]] = set()

    def _hand_off(self, prompt: SimulatedPrompt) -> None:
        assert prompt.state is not None
        token_ids = prompt.state.token_ids
        self.behaviour.fail_handoffs = int(token_ids not in self.failed)
        self.failed.add(token_ids)
        super()._hand_off(prompt)


@virtual
async def test_each_prompt_of_a_request_has_its_own_tries() -> None:
    cluster = FakeCluster("PPDD")
    cluster.kind = EachOnce
    prompts = [(5, 6, 7 + i) for i in range(8)]
    async with cluster.serving():
        first, second = (one for one in cluster.instances[:2] if isinstance(one, EachOnce))
        first.failed = second.failed
        answer = await collect(cluster.control.dispatch, request(*prompts, n=2))

        assert answer.tokens == {
            (i, sequence): expected(prompt, 4, sequence) for i, prompt in enumerate(prompts) for sequence in (0, 1)
        }
        ledger = cluster.control.dispatch.ledger
        assert (ledger.completed, ledger.failed, ledger.retried_prompts) == (1, 0, 8)
