"""Penalties, biases and bans against transformers' own logits processors and plain counting."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from engine.finish import banned_tokens
from engine.sampling.logits import change_logits, has_logit_changes
from engine.step import SampleRow
from tests.engine.both_choosers import sample
from tests.examples import examples
from wire.errors import InternalError, InvalidRequest
from wire.types import SamplingParams

_VOCAB = 40
_OFF = float("-inf")
_MIXED: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": -0.7,
    "logit_bias": ((3, 4.0), (5, -100.0)),
    "bad_words": ((7,), (1, 2)),
    "allowed_token_ids": tuple(range(30)),
    "stop_token_ids": (11, 12),
    "min_tokens": 5,
}


def _row(
    prompt: Sequence[int] = (), outputs: Sequence[int] = (), *, index: int = 0, mask: memoryview | None = None,
    **params: Any,
) -> SampleRow:  # fmt: skip
    given = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **params})
    history, position = [*prompt, *outputs], len(outputs)
    return SampleRow(
        index, given, 0, position, banned_tokens(given, position, history), history, len(prompt), mask
    )  # fmt: skip


def _logits(num_rows: int, seed: int = 0, vocab_size: int = _VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def _changed_logits(logits: torch.Tensor, *rows: SampleRow) -> torch.Tensor:
    return change_logits(logits.clone(), rows)


def _ids(*token_ids: int) -> torch.Tensor:
    return torch.tensor([list(token_ids)])


@examples(60)
@given(
    prompt=st.lists(st.integers(0, _VOCAB - 1), min_size=1, max_size=12),
    outputs=st.lists(st.integers(0, _VOCAB - 1), max_size=12),
    penalty=st.floats(0.1, 3.0),
    seed=st.integers(0, 999),
)
def test_repetition_penalty_is_that_of_transformers(
    prompt: list[int], outputs: list[int], penalty: float, seed: int
) -> None:
    logits = _logits(1, seed)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(_ids(*prompt, *outputs), logits.clone())

    assert torch.equal(_changed_logits(logits, _row(prompt, outputs, repetition_penalty=penalty)), expected)


@examples(60)
@given(
    prompt=st.lists(st.integers(0, _VOCAB - 1), min_size=1, max_size=12),
    outputs=st.lists(st.integers(0, 9), max_size=30),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
)
def test_only_outputs_are_counted(prompt: list[int], outputs: list[int], frequency: float, presence: float) -> None:
    logits, counts = _logits(1), Counter(outputs)
    expected = [x - counts[i] * frequency - (presence if counts[i] else 0.0) for i, x in enumerate(logits[0].tolist())]

    changed = _changed_logits(logits, _row(prompt, outputs, frequency_penalty=frequency, presence_penalty=presence))

    torch.testing.assert_close(changed[0], torch.tensor(expected), rtol=1e-6, atol=1e-5)


def test_logit_bias_is_a_sequence_bias_of_single_tokens() -> None:
    logits, bias = _logits(1), {(3,): 2.5, (17,): -100.0}
    expected = SequenceBiasLogitsProcessor(bias)(_ids(1), logits)

    assert torch.equal(_changed_logits(logits, _row([1], logit_bias=((3, 2.5), (17, -100.0)))), expected)


@examples(80)
@given(
    words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8, unique=True),
    history=st.lists(st.integers(0, 4), min_size=1, max_size=8),
)
def test_bad_words_are_those_of_transformers(words: list[tuple[int, ...]], history: list[int]) -> None:
    logits = _logits(1)
    expected = NoBadWordsLogitsProcessor([list(word) for word in words])(_ids(*history), logits)

    assert torch.equal(_changed_logits(logits, _row(history, bad_words=tuple(words))), expected)


@pytest.mark.parametrize("num_outputs", [0, 2, 3])
def test_stop_ids_before_min_tokens_are_banned_as_transformers_does(num_outputs: int) -> None:
    logits, prompt, outputs = _logits(1), [1, 2], [4] * num_outputs
    process = MinNewTokensLengthLogitsProcessor(len(prompt), 3, [11, 12], device="cpu")

    changed = _changed_logits(logits, _row(prompt, outputs, stop_token_ids=(11, 12), min_tokens=3))

    assert torch.equal(changed, process(_ids(*prompt, *outputs), logits))


def test_allowed_tokens_suppress_all_others_as_transformers_does() -> None:
    logits, allowed = _logits(1), (0, 8, 31)
    others = [token for token in range(_VOCAB) if token not in allowed]
    expected = SuppressTokensLogitsProcessor(others, device="cpu")(_ids(1), logits)

    assert torch.equal(_changed_logits(logits, _row([1], allowed_token_ids=allowed)), expected)


@pytest.mark.parametrize("stop", [-1, -_VOCAB, -(10**6), _VOCAB, 10**6])
def test_a_stop_id_outside_the_vocabulary_bans_nothing(stop: int) -> None:
    logits = _logits(3)

    changed = _changed_logits(
        logits, _row([1]), _row([1], index=1, min_tokens=2, stop_token_ids=(stop,)), _row([1], index=2)
    )

    assert torch.equal(changed, logits)


@pytest.mark.parametrize(("vocab_size", "words"), [(_VOCAB, 2), (70, 2), (70, 3)])
def test_a_mask_allows_the_tokens_whose_bits_are_set(vocab_size: int, words: int) -> None:
    allowed = {0, 1, 31, 32, 39, 63}
    bits = np.zeros(words, np.uint32)
    for token in allowed:
        bits[token // 32] |= np.uint32(1 << token % 32)
    logits = _logits(1, vocab_size=vocab_size)

    changed = _changed_logits(logits, _row([1], mask=bits.view(np.int32).data))

    for token in range(vocab_size):
        assert changed[0, token] == (logits[0, token] if token in allowed else _OFF)


def test_order_is_bias_then_repetition_then_counts() -> None:
    """transformers applies its sequence bias before the repetition penalty, vLLM the counts after both."""
    logits, prompt, outputs = _logits(1), [3, 9], [3, 3, 20]
    expected = SequenceBiasLogitsProcessor({(3,): 5.0})(_ids(1), logits)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(_ids(*prompt, *outputs), expected)
    for token, count in Counter(outputs).items():
        expected[0, token] -= count * 0.5 + 0.25
    row = _row(
        prompt, outputs, logit_bias=((3, 5.0),), repetition_penalty=1.7, frequency_penalty=0.5, presence_penalty=0.25
    )

    torch.testing.assert_close(_changed_logits(logits, row), expected, rtol=1e-6, atol=1e-6)


@examples(40)
@given(seed=st.integers(0, 10_000), chosen=st.lists(st.sampled_from(sorted(_MIXED)), max_size=8, unique=True))
def test_a_row_is_processed_the_same_alone_and_among_others(seed: int, chosen: list[str]) -> None:
    numbers = random.Random(seed)
    params = {name: _MIXED[name] for name in chosen}
    rows = [
        _row(numbers.choices(range(_VOCAB), k=5), numbers.choices(range(_VOCAB), k=i), **own)
        for i, own in enumerate([params, _MIXED, {}, {"repetition_penalty": 2.0}, {"logit_bias": ((1, 1.0),)}])
    ]
    logits = _logits(len(rows), seed)

    together = _changed_logits(logits, *rows)

    for i, row in enumerate(rows):
        assert torch.equal(together[i : i + 1], _changed_logits(logits[i : i + 1], row))
    assert torch.equal(together[2], logits[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_rows_are_sampled_beside_processed_ones(dtype: torch.dtype) -> None:
    logits = _logits(4).to(dtype)
    best = logits.argmax(dim=-1).tolist()
    rows = [_row([1]), _row([1], logit_bias=((6, 100.0),)), _row([1]), _row([1], allowed_token_ids=(9,))]

    assert sample(logits, rows).token_ids == [best[0], 6, best[2], 9]


def test_a_plain_row_is_not_processed() -> None:
    assert not has_logit_changes(_row([1, 2], [3], temperature=0.7, top_k=3, logprobs=4, bad_words=((1, 2, 30),)))
    assert all(
        has_logit_changes(_row([1], **{name: value, "min_tokens": 1, "stop_token_ids": (2,)}))
        for name, value in _MIXED.items()
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_tokens_are_all_banned_fails_alone(temperature: float) -> None:
    logits = _logits(3)
    alone = sample(logits[:1], [_row([1], temperature=temperature, seed=3)]).token_ids
    impossible = _row([1], temperature=temperature, allowed_token_ids=(4, 5), bad_words=((4,), (5,)))

    sampled = sample(logits, [_row([1], temperature=temperature, seed=3), impossible, _row([1])])

    ((index, error),) = sampled.failures
    assert index == 1
    assert isinstance(error, InvalidRequest)
    assert "no token is left to choose for output token 0: all are banned by allowed_token_ids, bad_words" in str(error)
    assert sampled.token_ids[0] == alone[0]
    assert sampled.token_ids[2] == int(logits[2].argmax())


def test_nan_logits_are_the_models_failure() -> None:
    logits = _logits(2)
    logits[1] = float("nan")

    ((index, error),) = sample(logits, [_row([1]), _row([1])]).failures

    assert index == 1
    assert isinstance(error, InternalError)
    assert "not numbers" in str(error)
