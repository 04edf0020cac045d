"""Log probabilities of outputs and of prompts against transformers' log_softmax, chunked, batched and handed over."""

import os
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.checkpoints.default_model import ensure_default_model
from engine.core import EngineCore
from engine.interface import Chunk, StepResult
from engine.loader import load_model
from engine.sampling import logprobs
from pdserve.run_folder import default_cache_dir
from tests.engine.fake_engines import engine, prompt
from tests.engine.test_core_handoff import hand_over
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from wire.errors import InvalidRequest
from wire.types import PromptLogprobs, PromptState, SamplingParams, TokenLogprobs

_TOLERANCE = 1e-4


@dataclass
class Outputs:
    """The outputs of an engine for one prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt: list[PromptLogprobs] = field(default_factory=list)

    def take(self, result: StepResult, prompt_id: str) -> None:
        for token in result.tokens:
            if token.prompt_id == prompt_id and token.token_id is not None:
                self.tokens.append(token.token_id)
                self.logprobs.append(token.logprobs)
        self.prompt += [part for part in result.prompt_logprobs if part.prompt_id == prompt_id]

    @property
    def of_prompt(self) -> list[TokenLogprobs | None]:
        """The prompt's log probabilities over all chunks; each chunk begins where the last one ended."""
        logprobs: list[TokenLogprobs | None] = []
        for part in self.prompt:
            assert part.start == len(logprobs)
            logprobs += part.tokens
        return logprobs


def _step_to_the_end(core: EngineCore, prompt_id: str, outputs: Outputs) -> Outputs:
    while core.has_work():
        result = core.step()
        assert result.failed == ()
        outputs.take(result, prompt_id)
    return outputs


def _prompt(length: int) -> tuple[int, ...]:
    numbers = random.Random(length)
    return tuple(numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length))


def _core(path: Path, *, chunk: int = 24) -> tuple[EngineCore, Any]:
    model = load_model(path, dtype="float32", block_size=16, kv_cache_memory=4 << 20, num_threads=1).model
    return EngineCore(model, max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=chunk), model


@torch.inference_mode()
def reference(path: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' log probabilities after each token, [num_tokens, vocab_size]."""
    network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return torch.log_softmax(network(input_ids=torch.tensor([list(token_ids)])).logits[0].float(), dim=-1)


def assert_is(found: TokenLogprobs | None, expected: torch.Tensor, token_id: int, top: int) -> None:
    assert found is not None
    assert found.logprob == pytest.approx(float(expected[token_id]), abs=_TOLERANCE)
    assert 1 + int((expected > expected[token_id] + _TOLERANCE).sum()) <= found.rank
    assert found.rank <= 1 + int((expected > expected[token_id] - _TOLERANCE).sum())
    assert len(found.top_ids) == len(set(found.top_ids)) == top
    assert list(found.top_logprobs) == pytest.approx(expected.topk(top).values.tolist(), abs=_TOLERANCE)
    for other, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        assert logprob == pytest.approx(float(expected[other]), abs=_TOLERANCE)


def assert_equal(outputs: Outputs, path: Path, state: PromptState) -> None:
    """Assert that all requested log probabilities are there and equal those of transformers."""
    expected = reference(path, [*state.token_ids, *outputs.tokens])
    length, top = len(state.token_ids), state.params.logprobs or 0
    assert len(outputs.tokens) == len(outputs.logprobs) == state.params.max_tokens
    for i, (token_id, one) in enumerate(zip(outputs.tokens, outputs.logprobs, strict=True)):
        assert_is(one, expected[length + i - 1], token_id, top)
    if state.params.prompt_logprobs is not None:
        first, *others = outputs.of_prompt
        assert first is None
        assert len(others) == length - 1
        for i, one in enumerate(others):
            assert_is(one, expected[i], state.token_ids[i + 1], state.params.prompt_logprobs)


def _family(name: str) -> Callable[[Path], Path]:
    return lambda folder: make_family(name, folder)


@pytest.mark.parametrize("length", [1, 2, 24, 25, 61])
def test_they_are_those_of_transformers_whatever_the_chunks(length: int, tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=4, logprobs=3, prompt_logprobs=2)
    state = PromptState("p", "r", _prompt(length), params)
    core, model = _core(path)
    with closing(model):
        core.add(PromptState("other", "r2", _prompt(40), SamplingParams(max_tokens=9)))
        core.add(state)

        assert_equal(_step_to_the_end(core, "p", Outputs()), path, state)


@pytest.mark.parametrize(
    "make",
    [lambda folder: make_tiny_model("opt", folder), *map(_family, ("gemma2", "cohere", "llama4_text"))],
    ids=["nested decoder", "soft cap", "scaled", "odd prefix"],
)
def test_logprobs_include_the_models_final_transform(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    state = PromptState("p", "r", _prompt(50), SamplingParams(4, temperature=0.0, logprobs=2, prompt_logprobs=2))
    core, model = _core(path)
    with closing(model):
        core.add(state)

        assert_equal(_step_to_the_end(core, "p", Outputs()), path, state)


def test_many_rows_are_computed_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_family("gemma2", tmp_path)
    monkeypatch.setattr(logprobs, "SLICE_BYTES", 5 * 4 * VOCAB_SIZE)
    state = PromptState("p", "r", _prompt(61), SamplingParams(2, temperature=0.0, logprobs=0, prompt_logprobs=1))
    core, model = _core(path, chunk=64)
    with closing(model):
        core.add(state)
        seen: list[int] = []
        head = model._network.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[-2]))
        outputs = _step_to_the_end(core, "p", Outputs())
        head.remove()

        assert max(seen) == 5
        assert_equal(outputs, path, state)


def test_logprobs_are_continuous_across_a_hand_off(tmp_path: Path) -> None:
    path = make_tiny_model("qwen3", tmp_path)
    params = SamplingParams(
        max_tokens=7, temperature=1.2, seed=9, logprobs=4, prompt_logprobs=0, repetition_penalty=1.3
    )
    state = PromptState("p", "r", _prompt(53), params)
    (p, p_model), (d, d_model) = _core(path), _core(path)
    with closing(p_model), closing(d_model):
        outputs, chunks = Outputs(), list[Chunk]()
        p.add(state, hold=True)
        while not p.load().held_prompts:
            result = p.step(lambda layer, now: chunks.extend(now) if layer == 1 else None)
            outputs.take(result, "p")
        (prefilled,) = result.prefilled
        assert len(outputs.of_prompt) == 53, "P reports the whole prompt"
        d.admit(prefilled.state, hand_over(state, p_model, chunks, d, d_model))

        assert_equal(_step_to_the_end(d, "p", outputs), path, state)


@pytest.mark.parametrize("given", [1, 5])
def test_resuming_from_tokens_gives_the_same_rest(given: int, tmp_path: Path) -> None:
    params = SamplingParams(
        9, temperature=1.3, seed=2, logprobs=3, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3,
        bad_words=((30,), (31, 32)), min_tokens=8, stop_token_ids=tuple(range(100, 200)),
    )  # fmt: skip
    state = PromptState("p", "r", _prompt(37), params)
    path = make_tiny_model("qwen2", tmp_path)
    (first, first_model), (other, other_model) = _core(path), _core(path, chunk=16)
    with closing(first_model), closing(other_model):
        first.add(state)
        whole = _step_to_the_end(first, "p", Outputs())
        other.add(replace(state, outputs=(tuple(whole.tokens[:given]),)))
        rest = _step_to_the_end(other, "p", Outputs())

    assert rest.tokens == whole.tokens[given:]
    for one, before in zip(rest.logprobs, whole.logprobs[given:], strict=True):
        assert one is not None
        assert before is not None
        assert (one.rank, one.top_ids) == (before.rank, before.top_ids)
        assert one.logprob == pytest.approx(before.logprob, abs=1e-5)


@pytest.mark.usefixtures("runs_ahead")
def test_a_resumed_prompts_logprobs_are_not_repeated() -> None:
    state = prompt("x", 30, prompt_logprobs=1, logprobs=0)
    with engine(chunk=8) as (core, _):
        core.add(state)
        whole = _step_to_the_end(core, "x", Outputs())
        core.add(replace(state, outputs=(tuple(whole.tokens[:4]),)))
        rest = _step_to_the_end(core, "x", Outputs())

    assert len(whole.of_prompt) == 30
    assert rest.prompt == []
    assert rest.logprobs == whole.logprobs[4:]


@pytest.mark.usefixtures("runs_ahead")
def test_a_prompt_with_all_tokens_banned_fails_alone() -> None:
    fine, impossible = prompt("fine", 9), prompt("impossible", 9, allowed_token_ids=(4,), bad_words=((4,),))
    with engine() as (core, _):
        core.add(fine)
        core.add(impossible)
        result = core.step()

        ((prompt_id, error),) = result.failed
        assert prompt_id == "impossible"
        assert isinstance(error, InvalidRequest)
        assert "no token is left to choose" in str(error)
        assert [token.prompt_id for token in result.tokens] == ["fine"]
        core.cancel("fine")


@pytest.mark.usefixtures("runs_ahead")
def test_a_token_id_outside_the_model_is_refused_first() -> None:
    with engine() as (core, _), pytest.raises(InvalidRequest, match=r"token id 500, .* \[0, 500\)"):
        core.check(prompt("x", 9, logit_bias=((500, 1.0),)))


def test_without_logprobs_only_requests_for_them_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, model = _core(make_family("gemma2", tmp_path))
    monkeypatch.setattr(model._head, "_parts", [])
    with closing(model):
        core.add(PromptState("asks", "r", _prompt(9), SamplingParams(4, temperature=0.0, prompt_logprobs=1)))
        core.add(PromptState("other", "r", _prompt(9), SamplingParams(4, temperature=0.0)))
        result = core.step()

        ((prompt_id, error),) = result.failed
        assert prompt_id == "asks"
        assert "Gemma2ForCausalLM has no decoder whose hidden states can be kept" in str(error)
        assert [token.prompt_id for token in result.tokens] == ["other"]
        core.cancel("other")


@pytest.mark.long
def test_those_of_the_default_model_equal_transformers_too() -> None:
    path = ensure_default_model(default_cache_dir(os.environ), lambda words: None)
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, logprobs=5, prompt_logprobs=5)
    state = PromptState("p", "r", tuple(1000 + 37 * i for i in range(70)), params)
    core, model = _core(path)
    with closing(model):
        core.add(state)

        assert_equal(_step_to_the_end(core, "p", Outputs()), path, state)
