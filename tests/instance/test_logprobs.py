"""Log probabilities over a real pair: the prompt's and first token's from P, the rest from D, as from one engine."""

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.instance.pair import Client, instance_config, running
from wire.messages import Failed, Generate, HandedOff, Prefill, Refused, Reserve, Reserved, Step
from wire.types import PromptLogprobs, PromptState, Role, SamplingParams, TokenLogprobs, TokenOutput

_PARAMS = SamplingParams(
    8, temperature=1.0, seed=5, n=2, logprobs=2, prompt_logprobs=3, bad_words=((7,), (8, 9)), min_tokens=4,
    stop_token_ids=tuple(range(0, 500, 2)),
)  # fmt: skip
_STATE = PromptState("p", "r", tuple(range(3, 53)), _PARAMS)


@dataclass
class Outputs:
    """The outputs of an instance for one prompt."""

    tokens: list[TokenOutput] = field(default_factory=list)
    prompt: list[PromptLogprobs] = field(default_factory=list)

    async def receive(self, client: Client, num_ends: int) -> None:
        """Read steps until so many sequences have finished, or the hand-off is done."""
        while sum(token.finish is not None for token in self.tokens) < num_ends:
            event = await client.next(Step, HandedOff, Failed)
            if isinstance(event, HandedOff):
                return
            assert isinstance(event, Step), event
            self.tokens += event.tokens
            self.prompt += event.prompt_logprobs

    @property
    def of_prompt(self) -> list[TokenLogprobs | None]:
        """The prompt's log probabilities over all its chunks, in order."""
        assert [part.start for part in self.prompt] == sorted(part.start for part in self.prompt)
        return [one for part in self.prompt for one in part.tokens]


async def _handed_over(folder: Path) -> tuple[Outputs, Outputs]:
    """Hand the prompt over; return the outputs of P and of D."""
    from_p, from_d = Outputs(), Outputs()
    async with contextlib.AsyncExitStack() as stack:
        prefill = instance_config(folder, Role.PREFILL, port=4, prefill_chunk_size=16)
        _, p = await stack.enter_async_context(running(prefill))
        _, d = await stack.enter_async_context(running(instance_config(folder, Role.DECODE, port=6)))
        await d.session.send(Reserve(_STATE))
        reserved = await d.next(Reserved, Refused)
        assert isinstance(reserved, Reserved)
        await p.session.send(Prefill(_STATE, reserved.ticket))
        await from_p.receive(p, _PARAMS.n)
        await from_d.receive(d, _PARAMS.n - sum(token.finish is not None for token in from_p.tokens))
    return from_p, from_d


async def _on_one(folder: Path) -> Outputs:
    outputs = Outputs()
    async with running(instance_config(folder, Role.COMBINED, port=4, prefill_chunk_size=16)) as (_, client):
        await client.session.send(Generate(_STATE))
        await outputs.receive(client, _PARAMS.n)
    return outputs


def test_prefill_returns_prompt_logprobs_and_decode_the_rest(tmp_path: Path) -> None:
    alone = asyncio.run(_on_one(tmp_path))

    from_p, from_d = asyncio.run(_handed_over(tmp_path))

    assert from_d.prompt == []
    assert len(from_p.prompt) == 4  # chunks
    assert from_p.of_prompt == alone.of_prompt
    assert from_p.of_prompt[0] is None
    assert [len(one.top_ids) for one in from_p.of_prompt[1:] if one] == [3] * 49
    assert {token.index for token in from_p.tokens} == {0}
    assert sorted(from_p.tokens, key=_place) == [token for token in sorted(alone.tokens, key=_place) if not token.index]
    for token in (*from_p.tokens, *from_d.tokens):
        assert token.logprobs is not None
        assert len(token.logprobs.top_ids) == 2


def _place(token: TokenOutput) -> tuple[int, int]:
    return token.sequence, token.index


def test_a_prompt_with_all_tokens_banned_fails_with_a_reason(tmp_path: Path) -> None:
    params = SamplingParams(8, allowed_token_ids=(7,), bad_words=((7,),))

    async def run() -> Failed:
        async with running(instance_config(tmp_path, Role.COMBINED, port=4)) as (_, client):
            await client.session.send(Generate(replace(_STATE, params=params)))
            failed = await client.next(Step, Failed)
            assert isinstance(failed, Failed)
            return failed

    failed = asyncio.run(run())

    assert failed.error == "InvalidRequest"
    assert "no token is left to choose" in failed.message
