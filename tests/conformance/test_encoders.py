"""An encoder and a cross-encoder behind the HTTP API, the real engine in this process, against transformers."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification

from flags.options import EngineOptions
from instance.config import InstanceConfig
from instance.local import LocalInstance
from scheduler.app import build_app
from scheduler.app_context import AppContext
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.model.files import read_model_files
from scheduler.observability.metrics import Metrics
from scheduler.serving import Cluster, build_control, report
from scheduler.tokens import Tokens
from tests.engine.tiny_encoders import VOCABULARY, make_bert, make_cross_encoder, make_decoder_classifier
from tests.scheduler.virtual_time import until
from wire.types import Role

pytestmark = pytest.mark.anyio

WORDS = [f"w{index}" for index in range(VOCABULARY - 2)]
PAIRS = [("w1 w2 w3", "w9 w8 w7 w6"), ("w1 w2 w3", "w1 w2 w3"), ("w1 w2 w3", "w50")]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def save_words(folder: Path) -> Tokenizer:
    """Write a tokenizer of words that marks both ends, and the second text of a pair."""
    vocab = {word: index for index, word in enumerate(["[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[SEP]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the model from one combined instance, as `pdserve serve` does; ready once a probe got through."""
    config = SchedulerConfig(EngineOptions(model=str(folder), dtype="float32"), SchedulerOptions())
    instance = await LocalInstance.start(InstanceConfig(config.engine, Role.COMBINED, device_ids=("0",)))
    expected = ExpectedInstance(0, "combined-0", Role.COMBINED, "127.0.0.1:0", "127.0.0.1", ("0",))
    files = read_model_files(str(folder))
    control = build_control(Cluster((expected,), lambda _: instance.connection()), ControlLimits(), files.kind)
    context = AppContext(config, control.dispatch, Tokens(files), Metrics(control.view), lambda: report(control))
    running = asyncio.create_task(control.run())
    try:
        await until(control.ready, timeout_s=60)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(build_app(context)), base_url="http://test"
        ) as client:
            yield client
    finally:
        await control.dispatch.close(0)
        running.cancel()
        await asyncio.wait({running}, timeout=10)
        await instance.stop()


async def post(client: httpx.AsyncClient, folder: Path, path: str, **fields: Any) -> Any:
    response = await client.post(path, json={"model": str(folder)} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_an_encoder_embeds_scores_by_cosine_and_generates_nothing(tmp_path: Path) -> None:
    folder = make_bert(tmp_path / "bert")
    tokenizer = save_words(folder)
    texts = [text for pair in PAIRS for text in pair]
    async with serving(folder) as client:
        embedded = await post(client, folder, "/v1/embeddings", input=texts)
        scored = await post(client, folder, "/v1/score", text_1="w1 w2 w3", text_2=[second for _, second in PAIRS])
        ready = await client.get("/ready")
        refusals = [
            await client.post("/v1/completions", json={"model": str(folder), "prompt": "w1"}),
            await client.post("/v1/chat/completions", json={"model": str(folder), "messages": []}),
            await client.post("/v1/embeddings", json={"model": str(folder), "input": "w1 " * 63}),
        ]

    assert (ready.status_code, ready.json()["missing"]) == (200, [])
    network = AutoModel.from_pretrained(folder).eval()
    vectors = [cls_vector(network, tokenizer.encode(text).ids) for text in texts]
    for one, vector in zip(embedded["data"], vectors, strict=True):
        assert one["embedding"] == pytest.approx(vector.tolist(), abs=1e-5)
    expected = [float(vectors[0] @ vectors[2 * index + 1]) for index in range(len(PAIRS))]
    assert [one["score"] for one in scored["data"]] == pytest.approx(expected, abs=1e-5)
    assert [(one.status_code, one.json()["error"]["param"]) for one in refusals] == [
        (400, "model"), (400, "model"), (400, "input"),
    ]  # fmt: skip
    assert "makes vectors; /v1/completions needs one that generates text" in refusals[0].json()["error"]["message"]


async def test_a_cross_encoder_scores_pairs_and_makes_no_vectors(tmp_path: Path) -> None:
    folder = make_cross_encoder(tmp_path / "cross")
    tokenizer = save_words(folder)
    async with serving(folder) as client:
        scored = await post(
            client, folder, "/v1/score", text_1=[one for one, _ in PAIRS], text_2=[one for _, one in PAIRS]
        )
        refused = await client.post("/v1/embeddings", json={"model": str(folder), "input": "w1"})

    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for one, pair in zip(scored["data"], PAIRS, strict=True):
        with torch.no_grad():
            logit = float(network(input_ids=torch.tensor([tokenizer.encode(*pair).ids])).logits[0, 0])
        assert one["score"] == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-4)
        assert 0 <= one["score"] <= 1
    assert scored["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(*pair).ids) for pair in PAIRS)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


@pytest.mark.covers("B.pooling.5")
async def test_a_decoder_with_three_classes_classifies_texts_and_tokens(tmp_path: Path) -> None:
    names = {0: "bad", 1: "fair", 2: "good"}
    folder = make_decoder_classifier("qwen3", tmp_path / "classes", num_labels=3, id2label=names)
    tokenizer, texts = save_words(folder), ["w1 w2 w3", "w50", "w9 w8 w7 w6 w5"]
    async with serving(folder) as client:
        classified = await post(client, folder, "/classify", input=texts)
        each = await post(client, folder, "/pooling", input=texts[0], task="token_classify", use_activation=False)
        refused = await client.post("/rerank", json={"query": "w1", "documents": texts})

    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = [network(input_ids=torch.tensor([tokenizer.encode(text).ids])).logits[0] for text in texts]
    for one, expected in zip(classified["data"], logits, strict=True):
        assert one["probs"] == pytest.approx(expected.softmax(-1).tolist(), rel=1e-4)
        assert (one["label"], one["num_classes"]) == (names[int(expected.argmax())], 3)
    tokens = each["data"][0]["data"]
    assert len(tokens) == len(tokenizer.encode(texts[0]).ids)
    assert tokens[-1] == pytest.approx(logits[0].tolist(), rel=1e-4)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


def cls_vector(network: Any, ids: list[int]) -> torch.Tensor:
    """Return the first token's hidden state at length 1: the vector of an encoder without further files."""
    with torch.no_grad():
        hidden: torch.Tensor = network(input_ids=torch.tensor([ids])).last_hidden_state[0, 0].double()
    unit: torch.Tensor = hidden / hidden.norm()
    return unit
