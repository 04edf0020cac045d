"""Log probabilities reach the client once and in order, from P and D, and after a retry."""

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest

from simulation.instance import SimulatedInstance
from tests.scheduler.fake_cluster import Answer, FakeCluster, request
from tests.scheduler.virtual_time import until, virtual
from wire.event_sink import EventSink
from wire.messages import Event, Step
from wire.types import PromptLogprobs, TokenLogprobs

PROMPT = tuple(range(5, 75))  # of three chunks


def logprob(sequence: int, index: int) -> TokenLogprobs:
    return TokenLogprobs(-(1 + sequence + index / 8), 1 + index)


def of_prompt(start: int, end: int) -> tuple[TokenLogprobs | None, ...]:
    return tuple(TokenLogprobs(-float(i), i) if i else None for i in range(start, end))


class Scoring(SimulatedInstance):
    """Reports each token's logprob; with the first token, and again with the second, those of the prompt."""

    def _emit(self, session: EventSink, event: Event) -> None:
        if isinstance(event, Step):
            tokens = tuple(
                dataclasses.replace(token, logprobs=logprob(token.sequence, token.index)) for token in event.tokens
            )
            scored = tuple(
                PromptLogprobs(token.prompt_id, start, of_prompt(start, end))
                for token in event.tokens
                if token.sequence == 0 and token.index < 2
                for start, end in ((0, 33), (33, 65), (65, 70))
            )
            event = dataclasses.replace(event, tokens=tokens, prompt_logprobs=scored)
        super()._emit(session, event)


class ScoredAnswer(Answer):
    """Counts the parts of the prompt's log probabilities, which must all precede its output."""

    num_parts = 0

    def prompt_logprobs(self, prompt_index: int, tokens: Sequence[TokenLogprobs | None]) -> None:
        """Check a part and keep it."""
        assert not self.outputs
        self.num_parts += 1
        super().prompt_logprobs(prompt_index, tokens)


async def scored_answer(roles: str, *, killed: int | None = None, n: int = 2) -> ScoredAnswer:
    """Run one request; kill instance `killed` after a few tokens."""
    cluster = FakeCluster(roles)
    cluster.kind = Scoring
    answer = ScoredAnswer()
    async with cluster.serving():
        requested = request(PROMPT, n=n, max_tokens=6, logprobs=0, prompt_logprobs=0)
        task = asyncio.create_task(cluster.control.dispatch.run(requested, answer))
        await until(lambda: sum(map(len, answer.outputs.values())) >= 3 * n)
        if killed is not None:
            cluster.kill(killed)
        await task
    return answer


@pytest.mark.parametrize(("roles", "killed"), [("PD", None), ("C", None), ("PDD", 1), ("CC", 0)])
@virtual
async def test_each_logprob_is_reported_once_and_in_order(roles: str, killed: int | None) -> None:
    answer = await scored_answer(roles, killed=killed)

    assert tuple(answer.scored[0]) == of_prompt(0, len(PROMPT))
    assert answer.num_parts == 3
    for sequence in range(2):
        assert [token.logprobs for token in answer.outputs[0, sequence]] == [
            logprob(sequence, index) for index in range(6)
        ]
