"""A second attempt over a real pair: the prompt comes with the tokens already sent, and continues from them."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.instance.pair import Client, instance_config, running
from wire.messages import Failed, HandedOff, Prefill, Refused, Reserve, Reserved, Step
from wire.types import PromptState, Role, SamplingParams, TokenOutput

STATE = PromptState("first", "r", tuple(range(3, 53)), SamplingParams(max_tokens=8, temperature=1.0, seed=5, n=2))


async def tokens_of(p: Client, d: Client, state: PromptState) -> tuple[list[TokenOutput], list[TokenOutput]]:
    """Hand a prompt over; return the tokens of P and of D."""
    await d.session.send(Reserve(state))
    reserved = await d.next(Reserved, Refused)
    assert isinstance(reserved, Reserved)
    await p.session.send(Prefill(state, reserved.ticket))
    from_p: list[TokenOutput] = []
    while isinstance(event := await p.next(Step, HandedOff, Failed), Step):
        from_p += event.tokens
    assert isinstance(event, HandedOff)
    from_d: list[TokenOutput] = []
    while sum(token.finish is not None for token in from_d) < state.params.n:
        step = await d.next(Step, Failed)
        assert isinstance(step, Step), step
        from_d += step.tokens
    return from_p, from_d


def of_sequence(tokens: Sequence[TokenOutput], sequence: int) -> list[tuple[int, int | None]]:
    return [(token.index, token.token_id) for token in tokens if token.sequence == sequence]


def test_decode_goes_on_from_the_tokens_given_and_prefill_makes_none(tmp_path: Path) -> None:
    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            _, p = await stack.enter_async_context(running(instance_config(tmp_path, Role.PREFILL, port=4)))
            _, d = await stack.enter_async_context(running(instance_config(tmp_path, Role.DECODE, port=6)))
            firsts, rest = await tokens_of(p, d, STATE)
            in_order = sorted(firsts, key=lambda token: token.sequence)
            given = tuple((token.token_id,) for token in in_order if token.token_id is not None)
            again = replace(STATE, prompt_id="again", outputs=given)

            from_p, from_d = await tokens_of(p, d, again)

            assert len(given) == 2
            assert from_p == []
            for sequence in range(2):
                assert of_sequence(from_d, sequence) == of_sequence(rest, sequence)
                assert from_d[0].index == 1

    asyncio.run(run())
