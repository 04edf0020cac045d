"""How long a prompt waits for what an instance tells."""

import asyncio
from dataclasses import replace

import pytest

from scheduler.inbox import PromptStep, Work
from scheduler.prompt_run import PromptRun
from scheduler.request import GenerationRequest
from tests.scheduler.virtual_time import virtual
from wire.errors import DeadlineExceeded
from wire.types import FinishReason, SamplingParams, TokenOutput

REQUEST = GenerationRequest("r", ((1, 2),), SamplingParams(max_tokens=9), 60.0, 10.0)


def started_prompt(*, short_of_blocks: bool) -> tuple[PromptRun, Work]:
    """A prompt with one token out, attended by one instance."""
    prompt = PromptRun(REQUEST, 0, lambda: "p", lambda token: None)
    work = Work("decode-0", "p", prompt.inbox, lambda command: None, lambda: short_of_blocks)
    prompt._works.append(work)
    prompt.take(PromptStep("p", (TokenOutput("p", 0, 0, 5),)), work)
    return prompt, work


@virtual
async def test_silence_of_an_instance_with_free_blocks_ends_at_the_stall_limit() -> None:
    prompt, _ = started_prompt(short_of_blocks=False)
    began = asyncio.get_running_loop().time()

    with pytest.raises(DeadlineExceeded, match="no progress for 10 s"):
        await prompt.next_arrival()

    assert asyncio.get_running_loop().time() - began == pytest.approx(10)


@virtual
async def test_a_prompt_dropped_from_a_full_pool_waits_longer_and_goes_on() -> None:
    prompt, work = started_prompt(short_of_blocks=True)
    step = PromptStep("p", (TokenOutput("p", 0, 1, 6),))
    asyncio.get_running_loop().call_later(35, work.deliver, step)

    arrival = await prompt.next_arrival()

    assert arrival.event == step


@virtual
async def test_waiting_for_blocks_has_an_end_too() -> None:
    prompt, _ = started_prompt(short_of_blocks=True)
    began = asyncio.get_running_loop().time()

    with pytest.raises(DeadlineExceeded, match="no progress"):
        await prompt.next_arrival()

    assert asyncio.get_running_loop().time() - began == pytest.approx(60)


@virtual
async def test_every_attempt_shares_kv_within_its_tenant_alone() -> None:
    prompt = PromptRun(replace(REQUEST, cache_salt="tenant"), 0, iter("pq").__next__, lambda token: None)
    first = prompt.state
    prompt.begin_attempt()

    assert (first.prompt_id, first.cache_salt) == ("p", "tenant")
    assert (prompt.state.prompt_id, prompt.state.cache_salt) == ("q", "tenant")


@virtual
async def test_steps_that_end_nothing_are_taken_at_once_and_put_the_deadline_off() -> None:
    told: list[int] = []
    prompt = PromptRun(REQUEST, 0, lambda: "p", lambda event: told.append(event.index))  # type: ignore[union-attr]
    work = Work("decode-0", "p", prompt.inbox, lambda command: None)
    prompt.take(PromptStep("p", (TokenOutput("p", 0, 0, 5),)), work)
    prompt.flow(work)
    loop = asyncio.get_running_loop()
    for index in range(1, 4):
        loop.call_later(8 * index, work.deliver, PromptStep("p", (TokenOutput("p", 0, index, 5),)))
    began = loop.time()

    with pytest.raises(DeadlineExceeded, match="no progress for 10 s"):
        await prompt.next_arrival()

    assert told == [0, 1, 2, 3]
    assert loop.time() - began == pytest.approx(34)


@virtual
async def test_a_step_with_an_ending_or_of_another_instance_wakes_who_hears() -> None:
    prompt, work = started_prompt(short_of_blocks=False)
    other = Work("prefill-0", "p", prompt.inbox, lambda command: None)
    prompt.flow(work)
    for sender, token in ((other, TokenOutput("p", 0, 1, 6)), (work, TokenOutput("p", 0, 1, 6, FinishReason.LENGTH))):
        sender.deliver(PromptStep("p", (token,)))

        assert (await prompt.next_arrival()).work is sender
