"""Beam search against transformers' own, on a tiny model whose logits are computed for one hypothesis at a time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from engine.beam_search import Offer, Search, advance, describe, num_candidates, ranking_score, resume, winners
from wire.types import Beam, BeamSearch, SamplingParams

VOCABULARY, EOS = 24, (3, 7, 12, 18)
# No id 0: transformers takes it for the padding and masks it.
PROMPTS = tuple(tuple(1 + (7 * i + 5 * j * j) % (VOCABULARY - 1) for j in range(3 + i)) for i in range(8))
SHARPNESS = 1.5  # of the random model's logits: far from ties, near enough for stop tokens to be likely
Candidates = Callable[[tuple[int, ...]], list[Offer]]


@pytest.fixture(scope="module")
def network() -> Any:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def offered_by(network: Any, prompt: tuple[int, ...], count: int) -> Candidates:
    @torch.inference_mode()
    def offer(outputs: tuple[int, ...]) -> list[Offer]:
        logits = network(torch.tensor([[*prompt, *outputs]])).logits[0, -1].float() * SHARPNESS
        best = logits.log_softmax(-1).topk(min(count, VOCABULARY))
        return [(t, value, None) for t, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    return offer


def search(offer: Candidates, params: SamplingParams) -> tuple[Beam, ...]:
    now, has_ended = Search(), False
    while not has_ended:
        step = advance(now, [offer(beam.token_ids) for beam in now.live], params, limit=params.max_tokens)
        now, has_ended = step.search, step.has_ended
    return winners(now, params)


def reference(network: Any, prompt: tuple[int, ...], params: SamplingParams) -> list[list[int]]:
    options = params.beam_search
    assert options is not None
    config = GenerationConfig(
        num_beams=params.num_beams, num_return_sequences=params.n, max_new_tokens=params.max_tokens,
        length_penalty=options.length_penalty, early_stopping=options.early_stopping, do_sample=False,
        eos_token_id=list(params.stop_token_ids) or None, pad_token_id=0,
    )  # fmt: skip
    with torch.inference_mode():
        rows = network.generate(torch.tensor([prompt]), generation_config=config, logits_processor=[_Sharper()])
    return [row[len(prompt) :].tolist() for row in rows]


class _Sharper:
    """What `offered_by` does to the logits, on the log probabilities that transformers' beams hand to processors."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return (scores * SHARPNESS).log_softmax(-1)


@pytest.mark.combinations(1)
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0, 2.5])
@pytest.mark.parametrize(("n", "width", "stops"), [(2, 4, EOS), (3, 3, EOS[:2]), (1, 2, ())])
def test_hypotheses_equal_those_of_transformers(
    network: Any, n: int, width: int, stops: tuple[int, ...], length_penalty: float, early_stopping: bool | str
) -> None:
    params = SamplingParams(
        max_tokens=12, temperature=0.0, n=n, best_of=width, stop_token_ids=stops,
        beam_search=BeamSearch(length_penalty, early_stopping),
    )  # fmt: skip
    stopped = 0
    for prompt in PROMPTS:
        found = search(offered_by(network, prompt, num_candidates(params)), params)

        wanted = reference(network, prompt, params)
        assert [list(beam.token_ids) for beam in found] == [_until_stop(row, stops) for row in wanted]
        assert [beam.stop_token_id is not None for beam in found] == [bool(set(row) & set(stops)) for row in wanted]
        scores = [ranking_score(beam, params) for beam in found]
        assert scores == sorted(scores, reverse=True)
        stopped += sum(beam.stop_token_id is not None for beam in found)
    assert bool(stopped) == bool(stops)


def test_a_search_continues_from_its_description(network: Any) -> None:
    params = SamplingParams(
        max_tokens=9, temperature=0.0, n=3, best_of=3, stop_token_ids=EOS, beam_search=BeamSearch(2.5, "never")
    )
    offer = offered_by(network, PROMPTS[1], num_candidates(params))
    now, has_ended = Search(), False
    while not has_ended:
        step = advance(now, [offer(beam.token_ids) for beam in now.live], params, limit=9)
        now, has_ended = step.search, step.has_ended
        if not has_ended:
            assert resume(describe(now), params, limit=9) == now

    assert winners(now, params) == search(offer, params)


def test_tokens_that_cannot_be_chosen_leave_fewer_beams() -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, n=2, best_of=3, beam_search=BeamSearch())
    only: list[Offer] = [(4, -0.5, None), (5, -1.0, None), (6, float("-inf"), None)]

    first = advance(Search(), [only], params, limit=2)
    last = advance(first.search, [only, only], params, limit=2)

    assert [one.token_id for one in first.kept] == [4, 5]
    assert last.has_ended
    assert [beam.token_ids for beam in winners(last.search, params)] == [(4, 4), (4, 5)]
    assert winners(last.search, replace(params, n=1))[0].score == -1.0


def _until_stop(row: list[int], stops: tuple[int, ...]) -> list[int]:
    """Return the ids up to the stop token: transformers pads after it."""
    ends = [i for i, token in enumerate(row) if token in stops]
    return row[: ends[0] + 1] if ends else row
