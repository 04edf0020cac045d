"""LLM's vectors and scores."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from pdserve import LLM
from tests.conformance.test_encoders import save_words
from tests.engine.tiny_encoders import make_decoder_classifier


def test_vectors_have_length_1_and_scores_are_their_cosines(local: LLM) -> None:
    texts = ["hello", "the quick brown fox", "hello"]
    made = [one.outputs.embedding for one in local.embed(texts)]
    many = local.score("hello", ["hello"] * 40 + ["the quick brown fox"])
    pairs = local.score(texts, texts[::-1])

    assert [math.fsum(value * value for value in vector) for vector in made] == pytest.approx([1.0] * 3, abs=1e-5)
    assert [one.outputs.data for one in local.encode(texts)] == [pytest.approx(one, abs=1e-6) for one in made]
    (each,) = local.encode(texts[1], pooling_task="token_embed", dimensions=8)
    assert [len(one) for one in each.outputs.data] == [8] * len(each.prompt_token_ids)
    assert repr(each.outputs) == f"PoolingOutput(data=[{len(each.prompt_token_ids)} tokens])"
    for refused in (lambda: local.encode("a", pooling_task="classify"), lambda: local.classify("a")):
        with pytest.raises(ValueError, match=r"prompt 0: .*the model generates text"):
            refused()
    cosines = [math.fsum(itertools.starmap(float.__mul__, zip(made[0], other, strict=True))) for other in made]
    assert [one.outputs.score for one in many] == pytest.approx([1.0] * 40 + [cosines[1]], abs=1e-5)
    assert [one.outputs.score for one in pairs] == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)
    assert local.embed("hello", dimensions=8)[0].outputs.hidden_size == 8
    with pytest.raises(ValueError, match="left texts is 2, but the number of right texts is 3"):
        local.score(texts[:2], texts)


def test_classes_and_rewards_equal_transformers(tmp_path: Path) -> None:
    folder = make_decoder_classifier("llama", tmp_path, num_labels=3)
    save_words(folder)
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with LLM(str(folder), dtype="float32") as llm:
        classes, rewards = llm.classify(["w1 w2", "w9"]), llm.reward(["w1 w2", "w9"])
        (each,) = llm.encode("w1 w2", pooling_task="token_classify")

    for one, reward in zip(classes, rewards, strict=True):
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([one.prompt_token_ids])).logits[0]
        assert one.outputs.probs == pytest.approx(logits.softmax(-1).tolist(), rel=1e-4)
        assert one.outputs.num_classes == 3
        assert reward.outputs.data == pytest.approx(logits.tolist(), rel=1e-4)
    assert [len(one) for one in each.outputs.data] == [3] * len(each.prompt_token_ids)
    assert each.outputs.data[-1] == pytest.approx(classes[0].outputs.probs, rel=1e-4)
