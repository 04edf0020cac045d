"""A step's events fit the session's messages whatever was requested, with the same content in the same order."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instance.step_parts import MAX_BYTES, parts_of
from rpc.channel import MAX_MESSAGE_BYTES
from tests.examples import examples
from wire.convert_messages import event_to_pb
from wire.load import LoadSnapshot
from wire.messages import Step
from wire.types import FinishReason, PromptLogprobs, StageTimes, TokenLogprobs, TokenOutput

LOAD = LoadSnapshot(blocks_total=1)
WIDEST = TokenLogprobs(-1.25, 2**31 - 1, tuple(range(2**31 - 128, 2**31)), tuple(-i / 7 for i in range(128)))
TOLD = StageTimes(0.1, 0.2, 0.3, 0.4, 0.5, 2**62, "process_group", 2**62, *[2**31 - 1] * 3)


def positions(start: int, count: int, score: TokenLogprobs = WIDEST) -> PromptLogprobs:
    return PromptLogprobs("p.17", start, (None, *[score] * (count - 1)))


def tokens(count: int, score: TokenLogprobs | None = None, prompt_id: str = "p.17") -> tuple[TokenOutput, ...]:
    last = FinishReason.CANCELLED
    return tuple(TokenOutput(prompt_id, 2**31 - 1, i, 2**31 - 1, last, 2**31 - 1, score) for i in range(count))


def sizes(parts: list[Step]) -> list[int]:
    return [event_to_pb(part).ByteSize() for part in parts]


def joined(parts: list[Step]) -> Step:
    """Return the step that was split into them."""
    scores: list[PromptLogprobs] = []
    for part in (part for step in parts for part in step.prompt_logprobs):
        last = scores[-1] if scores else None
        if last is not None and (last.prompt_id, last.start + len(last.tokens)) == (part.prompt_id, part.start):
            scores[-1] = replace(last, tokens=last.tokens + part.tokens)
        else:
            scores.append(part)
    return Step(
        tuple(token for step in parts for token in step.tokens),
        parts[0].load,
        tuple(times for step in parts for times in step.times),
        tuple(scores),
    )


def test_an_ordinary_step_is_one_message() -> None:
    step = Step(tokens(64, WIDEST), LOAD, (("p.17", TOLD),), (positions(0, 512),))

    assert list(parts_of(step)) == [step]


@pytest.mark.parametrize(
    "step",
    [
        Step((), LOAD, (("p.17", TOLD),), (positions(0, 10_000),)),
        Step(tokens(60_000, prompt_id="p" * 300), LOAD),
        Step(tokens(1000, WIDEST), LOAD, (), (positions(0, 6000), PromptLogprobs("q", 3, (WIDEST,) * 3000))),
    ],
    ids=["a long chunk with logprobs", "hypotheses of many beams", "several prompts"],
)
def test_a_step_too_large_for_a_message_is_split(step: Step) -> None:
    assert event_to_pb(step).ByteSize() > MAX_MESSAGE_BYTES

    parts = list(parts_of(step))

    assert max(sizes(parts)) <= MAX_BYTES
    assert joined(parts) == step
    kinds = [bool(part.prompt_logprobs) for part in parts]
    assert kinds == sorted(kinds, reverse=True)


@examples(40)
@given(
    st.lists(st.integers(1, 40), max_size=3), st.integers(0, 40), st.integers(0, 5), st.integers(0, 128),
    st.integers(200, 5000),
)  # fmt: skip
def test_no_part_is_above_its_limit_and_nothing_is_lost(
    chunks: list[int], num_tokens: int, num_times: int, wide: int, maximum: int
) -> None:
    score = TokenLogprobs(-1.25, 3, WIDEST.top_ids[:wide], WIDEST.top_logprobs[:wide])
    scored = tuple(PromptLogprobs(f"p{i}", 5, (score,) * count) for i, count in enumerate(chunks))
    step = Step(tokens(num_tokens, score), LOAD, tuple((f"t{i}", TOLD) for i in range(num_times)), scored)

    parts = list(parts_of(step, maximum))

    alone = len(event_to_pb(Step(tokens(1, score), LOAD)).SerializeToString())
    assert all(size <= max(maximum, alone) + event_to_pb(Step((), LOAD)).ByteSize() for size in sizes(parts))
    assert joined(parts) == step
