"""A reservation with a grammar waits while others are compiled; one without a grammar does not."""

import asyncio

import pytest

from scheduler.limits import ControlLimits
from simulation.instance import SimulatedInstance
from simulation.session import SimulatedSession
from tests.scheduler.fake_cluster import FakeCluster, collect, expected, request
from tests.scheduler.virtual_time import virtual
from wire.errors import InstanceLost
from wire.types import PromptState, StructuredOutput

PROMPT = tuple(range(40))
_COMPILES_S = 40.0


class Compiling(SimulatedInstance):
    """Delays the answer to a reservation with a grammar, or to `every` one, and otherwise works as usual."""

    every = False

    def _reserve(self, session: SimulatedSession, state: PromptState) -> None:
        if self.every or state.params.structured is not None:
            asyncio.get_running_loop().call_later(_COMPILES_S, super()._reserve, session, state)
        else:
            super()._reserve(session, state)


class Slow(Compiling):
    """Delays every reservation."""

    every = True


def _cluster() -> FakeCluster:
    cluster = FakeCluster("PD")
    cluster.kind = Compiling
    return cluster


@virtual
async def test_a_prompt_whose_grammar_waits_for_the_compiler_is_served() -> None:
    option = StructuredOutput("regex", "a+")
    async with _cluster().serving() as cluster:
        requested = request(PROMPT, limits_s=(120.0, 10.0), structured=option)

        answer = await collect(cluster.control.dispatch, requested)

        assert answer.tokens[0, 0] == expected(PROMPT, 4)


@virtual
async def test_others_are_served_meanwhile() -> None:
    """A step of the fakes computes 32 prompt tokens, so one of these prompts takes the whole next step."""
    async with _cluster().serving() as cluster:
        loop, dispatch = asyncio.get_running_loop(), cluster.control.dispatch
        options = [StructuredOutput("regex", f"a{number}") for number in range(6)]
        compiling = [
            asyncio.create_task(collect(dispatch, request(PROMPT, limits_s=(120.0, 10.0), structured=option)))
            for option in options
        ]
        await asyncio.sleep(0)
        began = loop.time()

        answer = await collect(dispatch, request(PROMPT))

        assert answer.tokens[0, 0] == expected(PROMPT, 4)
        assert loop.time() - began < 6 * ControlLimits().unassign_after_s + 0.5
        assert [(await one).tokens[0, 0] for one in compiling] == [expected(PROMPT, 4)] * 6
        assert loop.time() - began < 2 * _COMPILES_S
        assert [instance.in_flight.outstanding_tokens for instance in cluster.control.registry.living()] == [0, 0]


@virtual
async def test_a_reservation_without_grammar_is_answered_in_time_or_fails() -> None:
    cluster = _cluster()
    cluster.kind = Slow
    async with cluster.serving():
        with pytest.raises(InstanceLost, match="did not answer a reservation within 5 s"):
            await collect(cluster.control.dispatch, request(PROMPT, limits_s=(120.0, 10.0)))
