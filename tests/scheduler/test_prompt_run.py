"""How long a prompt waits for an instance, and what its sink receives meanwhile."""

import asyncio
import dataclasses

import pytest

from scheduler.prompt_on_instance import PromptOnInstance, PromptStep
from scheduler.prompt_run import PromptRun, SinkFailed
from scheduler.recorded_output import RecordedOutput
from scheduler.request import GenerationRequest
from tests.scheduler.virtual_time import virtual
from wire.errors import DeadlineExceeded, HandoffFailed
from wire.messages import Cancel, Command, Failed, HandedOff
from wire.types import FinishReason, PromptImage, SamplingParams, StageTimes, TokenOutput

REQUEST = GenerationRequest("r", ((1, 2),), SamplingParams(max_tokens=9), 60.0, 10.0)


class Sink(RecordedOutput):
    """Accepts at most two tokens."""

    def emit(self, prompt_index: int, token: TokenOutput) -> bool:
        return super().emit(prompt_index, token) and token.index < 1


def step(index: int, finish: FinishReason | None = None) -> PromptStep:
    return PromptStep("p", [TokenOutput("p", 0, index, 5, finish)])


def started_prompt(*, short_of_blocks: bool, sink: RecordedOutput | None = None) -> tuple[PromptRun, PromptOnInstance]:
    """A prompt with one emitted token, running on one instance."""
    prompt = PromptRun(REQUEST, 0, sink or RecordedOutput(), lambda: "p")
    on_instance = PromptOnInstance("p", prompt, lambda command: None, lambda: short_of_blocks)
    prompt._on_instances.append(on_instance)
    prompt.on_step(on_instance, step(0))
    return prompt, on_instance


@virtual
async def test_a_silent_instance_with_free_blocks_fails_at_the_stall_limit() -> None:
    prompt, _ = started_prompt(short_of_blocks=False)
    began = asyncio.get_running_loop().time()

    with pytest.raises(DeadlineExceeded, match="no progress for 10 s"):
        await prompt.next_event()

    assert asyncio.get_running_loop().time() - began == pytest.approx(10)


@virtual
async def test_a_prompt_preempted_from_a_full_pool_waits_longer_and_goes_on() -> None:
    prompt, on_instance = started_prompt(short_of_blocks=True)
    event = HandedOff("p", StageTimes(kv_bytes=7))
    asyncio.get_running_loop().call_later(35, on_instance.on_event, event)

    assert await prompt.next_event() == (on_instance, event)
    assert prompt.times.kv_bytes == 7


@pytest.mark.parametrize("first", [0, 32])
@virtual
async def test_cached_tokens_are_those_of_the_first_placement(first: int) -> None:
    prompt, on_instance = started_prompt(short_of_blocks=False)
    prompt.on_event(on_instance, HandedOff("p", StageTimes(prefill_s=0.5, cached_tokens=first, written_tokens=16)))
    prompt.requeue()
    prompt.on_event(on_instance, HandedOff("p", StageTimes(prefill_s=0.25, cached_tokens=48, written_tokens=32)))

    assert (prompt.times.cached_tokens, prompt.times.written_tokens, prompt.times.prefill_s) == (first, 16, 0.25)


@virtual
async def test_waiting_for_blocks_has_a_limit_too() -> None:
    prompt, _ = started_prompt(short_of_blocks=True)
    began = asyncio.get_running_loop().time()

    with pytest.raises(DeadlineExceeded, match="no progress"):
        await prompt.next_event()

    assert asyncio.get_running_loop().time() - began == pytest.approx(60)


@virtual
async def test_waiting_for_blocks_ends_once_the_instance_has_some() -> None:
    prompt, on_instance = started_prompt(short_of_blocks=True)
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(25, setattr, on_instance, "short_of_blocks", lambda: False)

    with pytest.raises(DeadlineExceeded, match="no progress"):
        await prompt.next_event()

    assert loop.time() - began == pytest.approx(30)


@virtual
async def test_every_attempt_shares_kv_only_within_its_tenant() -> None:
    requested = dataclasses.replace(REQUEST, cache_salt="tenant")
    prompt = PromptRun(requested, 0, RecordedOutput(), iter("pq").__next__)
    first = prompt.state
    prompt.requeue()

    assert (first.prompt_id, first.cache_salt) == ("p", "tenant")
    assert (prompt.state.prompt_id, prompt.state.cache_salt) == ("q", "tenant")


@virtual
async def test_every_attempt_has_the_prompts_images() -> None:
    image = PromptImage(1, 2, b"a" * 32, (1, 1, 2), b"PNG")
    prompt = PromptRun(dataclasses.replace(REQUEST, images=((image,),)), 0, RecordedOutput(), iter("pq").__next__)
    first = prompt.state
    prompt.requeue()

    assert [(state.images, state.images[0].data) for state in (first, prompt.state)] == [((image,), b"PNG")] * 2


@virtual
async def test_tokens_are_emitted_as_they_arrive_and_extend_the_deadline() -> None:
    prompt, on_instance = started_prompt(short_of_blocks=False, sink=(sink := RecordedOutput()))
    loop = asyncio.get_running_loop()
    for index in range(1, 4):
        loop.call_later(8 * index, prompt.on_step, on_instance, step(index))
    began = loop.time()

    with pytest.raises(DeadlineExceeded, match="no progress for 10 s"):
        await prompt.next_event()

    assert [token.index for token in sink.outputs[0, 0]] == [0, 1, 2, 3]
    assert loop.time() - began == pytest.approx(34)


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, None])
@virtual
async def test_the_path_is_notified_when_all_sequences_have_ended(finish: FinishReason | None) -> None:
    sent = list[Command]()
    prompt = PromptRun(REQUEST, 0, Sink(), lambda: "p")
    on_instance = PromptOnInstance("p", prompt, sent.append)
    prompt._on_instances.append(on_instance)
    waiting = asyncio.create_task(prompt.next_event())
    for index in range(2):
        await asyncio.sleep(0)
        assert not waiting.done()
        prompt.on_step(on_instance, step(index, finish if index == 1 else None))

    assert await waiting is None
    assert sent == ([] if finish else [Cancel("p", 0)])


@virtual
async def test_the_first_token_starts_the_limit_without_progress_at_once() -> None:
    prompt = PromptRun(REQUEST, 0, RecordedOutput(), lambda: "p")
    on_instance, loop = PromptOnInstance("p", prompt, lambda command: None), asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(1, prompt.on_step, on_instance, step(0))

    with pytest.raises(DeadlineExceeded, match="no progress for 10 s"):
        await prompt.next_event()

    assert loop.time() - began == pytest.approx(11)


@virtual
async def test_tokens_that_arrive_in_the_turn_of_the_deadline_count() -> None:
    prompt, _ = started_prompt(short_of_blocks=False)
    waiting, loop = asyncio.create_task(prompt.next_event()), asyncio.get_running_loop()
    await asyncio.sleep(0)
    loop.call_at(prompt.deadline, prompt.fail, HandoffFailed("lost"))

    with pytest.raises(HandoffFailed, match="lost"):
        await waiting


@virtual
async def test_a_failure_after_the_last_token_is_no_failure_of_the_prompt() -> None:
    prompt, on_instance = started_prompt(short_of_blocks=False)
    prompt.on_step(on_instance, step(1, FinishReason.LENGTH))
    on_instance.on_event(Failed("p", "HandoffFailed", "lost"))

    assert await prompt.next_event() is None


@virtual
async def test_an_error_of_the_sink_fails_the_prompt_and_not_its_caller() -> None:
    class Broken(RecordedOutput):
        def emit(self, prompt_index: int, token: TokenOutput) -> bool:
            raise RuntimeError("broken")

    prompt, on_instance = started_prompt(short_of_blocks=False, sink=Broken())
    on_instance.on_event(Failed("p", "HandoffFailed", "lost"))  # which would be retried

    with pytest.raises(SinkFailed, match="broken"):
        await prompt.next_event()
