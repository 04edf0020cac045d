"""Classifiers of several architectures and numbers of labels compared with transformers, one text at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from engine.pooling.encoder import load_encoder
from tests.engine.test_pooling import answers, core_of, pooling_prompt
from tests.engine.tiny_encoders import TEXTS, make_cross_encoder, make_decoder_classifier
from wire.errors import ConfigError, InvalidRequest
from wire.types import Pooling


def make(kind: str, folder: Path, num_labels: int, **keys: Any) -> Path:
    if kind == "xlm-roberta":
        return make_cross_encoder(folder, num_labels=num_labels, **keys)
    return make_decoder_classifier(kind, folder, num_labels=num_labels, **keys)


@torch.inference_mode()
def logits_by_hand(path: Path, text: tuple[int, ...]) -> torch.Tensor:
    """Return [num_labels] float64."""
    network = AutoModelForSequenceClassification.from_pretrained(path).eval()
    network.config.pad_token_id = None  # one text without padding
    logits: torch.Tensor = network(input_ids=torch.tensor([text])).logits[0].double()
    return logits


def close(found: tuple[float, ...], wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted.flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.combinations(1)
@pytest.mark.parametrize("num_labels", [1, 2, 3])
@pytest.mark.parametrize("kind", ["xlm-roberta", "llama", "qwen3"])
def test_classes_equal_transformers_whatever_else_is_in_the_batch(kind: str, num_labels: int, tmp_path: Path) -> None:
    path = make(kind, tmp_path, num_labels)
    core = core_of(path)
    for i, text in enumerate(TEXTS):
        core.add(pooling_prompt(f"{i}", text, Pooling("classify")))
        core.add(pooling_prompt(f"{i} raw", text, Pooling("classify", normalize=False)))

    found = answers(core)
    core.close()

    for i, text in enumerate(TEXTS):
        logits = logits_by_hand(path, text)
        close(found[f"{i} raw"], logits)
        close(found[f"{i}"], logits.softmax(-1) if num_labels > 1 else logits.sigmoid())


def test_a_decoders_head_reads_each_token(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "llama", 3)
    core = core_of(path)
    core.add(pooling_prompt("each", TEXTS[2], Pooling("token_classify")))
    core.add(pooling_prompt("raw", TEXTS[1], Pooling("token_classify", normalize=False)))

    found = answers(core)
    core.close()

    each = [logits_by_hand(path, TEXTS[2][: end + 1]).softmax(-1) for end in range(len(TEXTS[2]))]
    close(found["each"], torch.stack(each))
    close(found["raw"], torch.stack([logits_by_hand(path, TEXTS[1][: end + 1]) for end in range(len(TEXTS[1]))]))
    whole = core_of(make("xlm-roberta", tmp_path / "x", 3))
    with pytest.raises(InvalidRequest, match="task is token_classify, but x supports only classify"):
        whole.add(pooling_prompt("a", TEXTS[1], Pooling("token_classify")))
    whole.close()


@pytest.mark.parametrize(
    ("num_labels", "keys", "activation"),
    [
        (1, {"problem_type": "regression"}, torch.clone),
        (3, {"problem_type": "multi_label_classification"}, torch.sigmoid),
        (2, {"problem_type": "single_label_classification"}, lambda logits: logits.softmax(-1)),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, torch.clone),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, torch.sigmoid),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, torch.clone),
    ],
)
def test_the_config_sets_the_activation(num_labels: int, keys: Any, activation: Any, tmp_path: Path) -> None:
    path = make("xlm-roberta", tmp_path, num_labels, **keys)
    core = core_of(path)
    core.add(pooling_prompt("a", TEXTS[2], Pooling("classify")))

    close(answers(core)["a"], activation(logits_by_hand(path, TEXTS[2])))
    core.close()


def test_an_unknown_activation_is_refused_by_name(tmp_path: Path) -> None:
    path = make("xlm-roberta", tmp_path, 1, sbert_ce_default_activation_function="os.path.Tanh")

    with pytest.raises(ConfigError, match="the activation Tanh is not supported: only Identity, Sigmoid and Softmax"):
        load_encoder(path, dtype="float32")
