"""Structured output of real instances: on one instance, over a hand-off, resumed, and refused."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from flags.options import EngineOptions
from instance.config import InstanceConfig
from tests.engine.tiny_models import make_tiny_model
from tests.instance.pair import Client, running
from wire.messages import Failed, Generate, HandedOff, Prefill, Refused, Reserve, Reserved, Step
from wire.types import FinishReason, PromptState, Role, SamplingParams, StructuredOutput, Thinking, TokenOutput

_PROMPT = tuple(range(3, 40))
_PATTERN = r"[a-z]{3,6}-(é|\d{2,4})!"
_EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny random checkpoint."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


def _prompt(
    prompt_id: str, option: StructuredOutput, seed: int, *, n: int = 1, thinking: Thinking | None = None
) -> PromptState:
    params = SamplingParams(max_tokens=60, seed=seed, n=n, stop_token_ids=(_EOS,), structured=option, thinking=thinking)
    return PromptState(prompt_id, "r", _PROMPT, params)


def _config(folder: Path, role: Role, port: int) -> InstanceConfig:
    options = EngineOptions(model=str(folder), dtype="float32", kv_cache_memory=4 << 20, port=port)
    return InstanceConfig(options, role, device_ids=(str(port),))


def _on_pair(folder: Path, test: Callable[[Client, Client], Awaitable[None]]) -> None:
    async def run() -> None:
        async with (
            running(_config(folder, Role.PREFILL, 4)) as (_, p),
            running(_config(folder, Role.DECODE, 6)) as (_, d),
        ):
            await test(p, d)

    asyncio.run(run())


async def _tokens(client: Client, count: int) -> list[TokenOutput]:
    """Return the tokens of steps until `count` sequences have finished."""
    tokens: list[TokenOutput] = []
    while sum(token.finish is not None for token in tokens) < count:
        event = await client.next(Step, Failed, Refused)
        assert isinstance(event, Step), event
        tokens.extend(event.tokens)
    return tokens


async def _generate_on_one(client: Client, state: PromptState) -> list[int]:
    await client.session.send(Generate(state))
    tokens = await _tokens(client, 1)
    assert tokens[-1].finish is FinishReason.STOP
    return [token.token_id for token in tokens if token.token_id is not None]


async def _generate_on_pair(p: Client, d: Client, state: PromptState) -> list[int]:
    await d.session.send(Reserve(state))
    reserved = await d.next(Reserved, Refused)
    assert isinstance(reserved, Reserved), reserved
    await p.session.send(Prefill(state, reserved.ticket))
    first = await p.next(Step, Failed, Refused)
    assert isinstance(first, Step), first
    assert isinstance(await p.next(HandedOff, Failed), HandedOff)
    rest = await _tokens(d, 1)
    return [token.token_id for token in (*first.tokens, *rest) if token.token_id is not None]


_END = 77
_THINKS = Thinking(76, _END, is_open=True, budget=5)


@pytest.mark.parametrize("thinking", [None, _THINKS], ids=["at-once", "after-thinking"])
def test_text_follows_its_grammar_combined_over_pd_and_resumed(folder: Path, thinking: Thinking | None) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    option = StructuredOutput("regex", _PATTERN)

    async def test(p: Client, d: Client) -> None:
        for seed in range(3):
            whole = await _generate_on_one(d, _prompt(f"whole-{seed}", option, seed, thinking=thinking))
            crossed = await _generate_on_pair(p, d, _prompt(f"crossed-{seed}", option, seed, thinking=thinking))

            begin = 0 if thinking is None else whole.index(_END) + 1
            assert re.fullmatch(_PATTERN, tokenizer.decode(whole[begin:]))
            assert crossed == whole
            assert thinking is None or begin <= 6
            for done in (3, 5, 6):
                begun = _prompt(f"resumed-{seed}-{done}", option, seed, thinking=thinking)
                resumed = await _generate_on_one(
                    p, PromptState(begun.prompt_id, "r", _PROMPT, begun.params, outputs=(tuple(whole[:done]),))
                )

                assert whole[:done] + resumed == whole

    _on_pair(folder, test)


def test_a_grammar_that_does_not_compile_is_refused_before_prefill(folder: Path) -> None:
    bad = StructuredOutput("regex", "(?=a)")

    async def test(p: Client, d: Client) -> None:
        await d.session.send(Reserve(_prompt("bad", bad, 1)))
        await d.session.send(Generate(_prompt("good", StructuredOutput("choice", '["a", "ab"]'), 1)))

        refused = await d.next(Refused, Reserved)
        assert isinstance(refused, Refused)
        assert (refused.prompt_id, refused.error) == ("bad", "InvalidGrammar")
        assert "look-around" in refused.message
        assert (await _tokens(d, 1))[-1].prompt_id == "good"

    _on_pair(folder, test)
