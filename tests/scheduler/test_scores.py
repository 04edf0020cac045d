"""How likely tokens are reaches the client's side once and in order, from P and D, and after a retry."""

import dataclasses

import pytest

from scheduler.request import NewToken, PromptScored
from testing.wire.fake_instance import FakeInstance
from tests.scheduler.fake_cluster import FakeCluster, request
from tests.scheduler.virtual_time import virtual
from wire.messages import Event, Step
from wire.types import PromptLogprobs, TokenLogprobs

PROMPT = tuple(range(5, 75))  # of three chunks


def likelihood(sequence: int, index: int) -> TokenLogprobs:
    return TokenLogprobs(-(1 + sequence + index / 8), 1 + index)


def of_prompt(start: int, end: int) -> tuple[TokenLogprobs | None, ...]:
    return tuple(TokenLogprobs(-float(i), i) if i else None for i in range(start, end))


class Telling(FakeInstance):
    """Tells how likely each token is; with a first token, and again with the second, how likely the prompt was."""

    def _emit(self, event: Event) -> None:
        if isinstance(event, Step):
            tokens = tuple(
                dataclasses.replace(token, logprobs=likelihood(token.sequence, token.index)) for token in event.tokens
            )
            scored = tuple(
                PromptLogprobs(token.prompt_id, start, of_prompt(start, end))
                for token in event.tokens
                if token.sequence == 0 and token.index < 2
                for start, end in ((0, 33), (33, 65), (65, 70))
            )
            event = dataclasses.replace(event, tokens=tokens, prompt_logprobs=scored)
        super()._emit(event)


async def told(roles: str, *, killed: int | None = None, n: int = 2) -> tuple[list[PromptScored], list[NewToken]]:
    """Run one request; kill instance `killed` after a few tokens."""
    cluster = FakeCluster(roles)
    cluster.kind = Telling
    scored: list[PromptScored] = []
    tokens: list[NewToken] = []
    async with cluster.serving():
        running = cluster.control.dispatch.start(request(PROMPT, n=n, max_tokens=6, logprobs=0, prompt_logprobs=0))
        async for event in running.events():
            if isinstance(event, PromptScored):
                assert not tokens, "the prompt is told of before its outputs"
                scored.append(event)
            elif isinstance(event, NewToken):
                tokens.append(event)
                if len(tokens) == 3 * n and killed is not None:
                    cluster.kill(killed)
                    killed = None
    return scored, tokens


@pytest.mark.parametrize(("roles", "killed"), [("PD", None), ("C", None), ("PDD", 1), ("CC", 0)])
@virtual
async def test_each_token_is_told_of_once_and_in_order(roles: str, killed: int | None) -> None:
    scored, tokens = await told(roles, killed=killed)

    assert tuple(one for part in scored for one in part.tokens) == of_prompt(0, len(PROMPT))
    assert [part.start for part in scored] == [0, 33, 65]
    for sequence in range(2):
        own = [token for token in tokens if token.sequence == sequence]
        assert [token.logprobs for token in own] == [likelihood(sequence, index) for index in range(6)]
