"""The oracle itself: greedy decoding written out by hand, end-of-sequence handling, logit gaps."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.oracle import Oracle, generate_greedy
from tests.engine.tiny_models import make_tiny_model

_PROMPT = [17, 99, 4, 250, 31]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def _by_hand(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Recompute the whole sequence for every token: no cache, no generate."""
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens.append(int(network(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_is_the_argmax_of_every_step(llama: Path) -> None:
    expected = _by_hand(llama, _PROMPT, 12)

    assert generate_greedy(llama, [_PROMPT], 12, ignore_eos=True) == [expected]


def test_an_end_of_sequence_id_ends_it_unless_ignored(llama: Path) -> None:
    tokens = _by_hand(llama, _PROMPT, 12)
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens[3]}))
    oracle = Oracle(llama, "float32")

    stopped = oracle.generate_greedy([_PROMPT], 12)

    assert stopped == [tokens[: tokens.index(tokens[3]) + 1]]
    assert oracle.generate_greedy([_PROMPT], 12, ignore_eos=True) == [tokens]
    assert oracle.generate_greedy([_PROMPT], 12) == stopped


def test_the_logit_gap_of_the_best_token_is_zero(llama: Path) -> None:
    oracle = Oracle(llama, "float32")
    best = oracle.generate_greedy([_PROMPT], 1, ignore_eos=True)[0][0]

    own, other = oracle.logit_gap(_PROMPT, best), oracle.logit_gap(_PROMPT, best + 1)

    assert (own.best_token, own.gap) == (best, 0.0)
    assert (other.best_token, other.token) == (best, best + 1)
    assert other.gap > 0
