"""What a model produces, by its config.json; engine/pooling and engine/headless.py read the same names."""

import json
from typing import Any

import pytest

from scheduler.model.files import read_model_files
from scheduler.model.kind import ModelKind, kind_of, labels_of


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("LlamaForCausalLM", ModelKind.TEXT),
        ("GPT2LMHeadModel", ModelKind.TEXT),
        ("Qwen2ForConditionalGeneration", ModelKind.TEXT),
        ("MistralModel", ModelKind.VECTORS),
        ("BertModel", ModelKind.VECTORS),
        ("BertForMaskedLM", ModelKind.VECTORS),
        ("BertForPreTraining", ModelKind.VECTORS),
        ("XLMRobertaForSequenceClassification", ModelKind.SCORES),
        ("Qwen3ForSequenceClassification", ModelKind.SCORES),
    ],
)
def test_the_first_architecture_decides(architecture: str, kind: ModelKind) -> None:
    assert kind_of({"architectures": [architecture, "Other"], "id2label": {"0": "LABEL_0"}}) is kind


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1")),
        ({"num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {"10": "l", "0": "bad", "2": "good"}}, ("bad", "good", "l")),
    ],
)
def test_a_classifiers_labels_are_those_of_its_config(config: dict[str, Any], labels: tuple[str, ...]) -> None:
    assert labels_of(config) == labels
    named = {"architectures": ["LlamaForSequenceClassification"], **config}
    assert kind_of(named) is (ModelKind.SCORES if len(labels) == 1 else ModelKind.CLASSES)


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": []}, {"architectures": "x"}])
def test_a_config_that_names_none_is_taken_for_a_text_model(config: dict[str, Any]) -> None:
    assert kind_of(config) is ModelKind.TEXT


@pytest.mark.covers("B.errors.11")
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("architecture", "words"),
    [("BertModel", "the model makes vectors"), ("BertForSequenceClassification", "the model classifies texts")],
)
async def test_a_model_that_generates_nothing_refuses_text_with_a_reason(
    serve: Any, make_model: Any, architecture: str, words: str
) -> None:
    config = make_model() / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [architecture]}))
    async with serve(folder=config.parent) as served:
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = await served.client.post(path, json={"model": served.model})

            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "model")
            assert error["message"] == f"{words}; {path} needs one that generates text"


@pytest.mark.parametrize(
    ("config", "sentence", "length"),
    [
        ({}, None, 512),
        ({"architectures": ["BertModel"]}, 128, 128),
        ({"architectures": ["BertModel"]}, 4096, 512),
        ({"architectures": ["LlamaForCausalLM"]}, 128, 512),
        ({"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "pad_token_id": 1}, None, 510),
    ],
)
def test_the_longest_text_is_what_the_engine_reads(
    make_model: Any, config: dict[str, Any], sentence: int | None, length: int
) -> None:
    folder = make_model()
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if sentence is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": sentence}))

    assert read_model_files(str(folder)).max_model_len == length
    assert read_model_files(str(folder), 100).max_model_len == 100
