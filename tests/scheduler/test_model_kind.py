"""What a model answers with, by its config.json; engine/pooling and engine/headless.py read the same names."""

import json
from typing import Any

import pytest

from scheduler.model_kind import ModelKind, kind_of


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
    assert kind_of({"architectures": [architecture, "Other"]}) is kind


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": []}, {"architectures": "x"}])
def test_a_config_that_names_none_is_taken_for_a_text_model(config: dict[str, Any]) -> None:
    assert kind_of(config) is ModelKind.TEXT


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("architecture", "words"),
    [("BertModel", "the model makes vectors"), ("BertForSequenceClassification", "the model scores pairs of texts")],
)
async def test_a_model_that_generates_nothing_refuses_text_in_words(
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
