"""The reference of `pdserve verify --features` and of the core's tests gives what `generate` itself gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from engine.oracle import load_plain
from engine.reference_decoding import ReferenceDecoder
from tests.engine.fake_engines import run
from tests.engine.test_core_beams import PROMPTS, core_of
from tests.engine.tiny_models import make_tiny_model
from wire.types import PromptState, SamplingParams

_BIAS = ((PROMPTS[3][0], 6.0), (PROMPTS[3][5], -4.0), (200, 3.0))
_WORDS = tuple((first, last) for first in range(0, 320, 3) for last in (7, 149, 200, 221))
_STOPS = tuple(range(3, 300, 2))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models"))


def _by_generate(path: Path, prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """Call transformers with its own settings."""
    settings: dict[str, Any] = {
        "sequence_bias": [[[token], bias] for token, bias in params.logit_bias] or None,
        "repetition_penalty": params.repetition_penalty,
        "bad_words_ids": [list(word) for word in params.bad_words] or None,
        "min_new_tokens": params.min_tokens or None,
        "eos_token_id": list(params.stop_token_ids) or None,
    }
    network = load_plain(path, "float32")
    network.generation_config = GenerationConfig(
        max_new_tokens=params.max_tokens, do_sample=False, pad_token_id=0, **settings
    )
    ids = torch.tensor([prompt])
    return tuple(network.generate(input_ids=ids, attention_mask=torch.ones_like(ids))[0, len(prompt) :].tolist())


@pytest.mark.parametrize(
    "shaping",
    [
        {"logit_bias": _BIAS, "repetition_penalty": 1.8},
        {"bad_words": _WORDS, "repetition_penalty": 0.7},
        {"min_tokens": 9, "stop_token_ids": _STOPS},
    ],
    ids=["bias before repetition", "bad_words", "min_tokens"],
)
def test_tokens_are_those_of_generate_and_the_engines_are_too(path: Path, shaping: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0, **shaping)
    wanted = _by_generate(path, PROMPTS[3], params)

    [decoded] = ReferenceDecoder(load_plain(path, "float32")).decode(PROMPTS[3], params)
    with core_of(path) as core:
        core.add(PromptState("a", "r", PROMPTS[3], params))
        answers = run(core)

    assert decoded.token_ids == wanted
    assert tuple(answers.tokens["a", 0]) == wanted


def test_many_together_are_decoded_as_each_alone(path: Path) -> None:
    drawn = SamplingParams(max_tokens=12, temperature=0.9, seed=5)
    requests = [
        *((prompt, params) for prompt in PROMPTS[:2] for params in (
            drawn, replace(drawn, n=3), replace(drawn, seed=6, n=2, best_of=4, logprobs=2),
            replace(drawn, max_tokens=3, repetition_penalty=1.5), replace(drawn, stop_token_ids=_STOPS),
            SamplingParams(max_tokens=7, temperature=0.0, prompt_logprobs=1),
        )),
    ]  # fmt: skip
    network = load_plain(path, "float32")
    together = ReferenceDecoder(network)
    together.prepare(requests)

    for prompt, params in requests:
        for ours, alone in zip(
            together.decode(prompt, params), ReferenceDecoder(network).decode(prompt, params), strict=True
        ):
            assert ours.token_ids == alone.token_ids
            assert [one.logprob for one in ours.logprobs] == pytest.approx(
                [one.logprob for one in alone.logprobs], abs=1e-5
            )
            assert [one.top_ids for one in ours.logprobs] == [one.top_ids for one in alone.logprobs]
            assert ours.margin == pytest.approx(alone.margin, abs=1e-5)


def test_decoded_tokens_are_reused_for_other_parameters(path: Path) -> None:
    network = load_plain(path, "float32")
    decoder, calls = ReferenceDecoder(network), []
    network.register_forward_hook(lambda *_: calls.append(1))
    params = SamplingParams(max_tokens=5, temperature=0.9, seed=5, n=4)
    four = decoder.decode(PROMPTS[0], params)
    known = len(calls)

    for other in (replace(params, n=2, best_of=4), replace(params, n=1), replace(params, prompt_logprobs=2)):
        assert all(one in four for one in decoder.decode(PROMPTS[0], other))
    assert len(calls) == known == 5
