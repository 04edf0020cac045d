"""A reservation waits for a grammar to be compiled behind others; one without a grammar does not."""

import asyncio

import pytest

from tests.scheduler.fake_cluster import FakeCluster, collect, expected, request
from tests.scheduler.virtual_time import virtual
from wire.errors import HandoffFailed
from wire.fake_instance import FakeInstance
from wire.types import PromptState, StructuredOutput

PROMPT = tuple(range(40))
_COMPILES_S = 40.0


class Compiling(FakeInstance):
    """Answers a reservation only after some time, while it lives and works as ever."""

    def _reserve(self, state: PromptState) -> None:
        asyncio.get_running_loop().call_later(_COMPILES_S, super()._reserve, state)


def _cluster() -> FakeCluster:
    cluster = FakeCluster("PD")
    cluster.kind = Compiling
    return cluster


@virtual
async def test_a_prompt_whose_grammar_waits_to_be_compiled_is_served() -> None:
    wish = StructuredOutput("regex", "a+")
    async with _cluster().serving() as cluster:
        asked = request(PROMPT, limits_s=(120.0, 10.0), structured=wish)

        answer = await collect(cluster.control.dispatch.start(asked))

        assert answer.tokens[0, 0] == expected(PROMPT, 4)


@virtual
async def test_a_prompt_without_a_grammar_is_answered_in_time_or_fails() -> None:
    async with _cluster().serving() as cluster:
        with pytest.raises(HandoffFailed, match="did not answer a reservation within 5 s"):
            await collect(cluster.control.dispatch.start(request(PROMPT, limits_s=(120.0, 10.0))))
