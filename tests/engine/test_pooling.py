"""Encoders compared with transformers, called directly on one text at a time without padding."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, LlamaConfig, MistralConfig, T5Config

from engine.checkpoints.model_identity import identify
from engine.pooling.core import EncoderCore
from engine.pooling.encoder import is_encoder, load_encoder
from engine.pooling.vectors import finish_vector
from engine.pooling_settings import PoolingSettings, read_settings
from tests.engine.tiny_encoders import TEXTS, VOCABULARY, make_bert, make_cross_encoder, write_pooling
from wire.errors import ConfigError, InternalError, InvalidRequest, PromptTooLong
from wire.types import Pooling, PromptState, SamplingParams


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cross_encoder(tmp_path_factory.mktemp("models") / "cross")


def core_of(path: Path, *, seqs: int = 8, tokens: int = 512) -> EncoderCore:
    encoder, _ = load_encoder(path, dtype="float32")
    identity = identify(path, path.name)
    return EncoderCore(encoder, identity, block_size=16, max_num_seqs=seqs, max_num_batched_tokens=tokens)


@pytest.fixture
def embedder(bert: Path) -> Iterator[EncoderCore]:
    core = core_of(bert)
    yield core
    core.close()


def pooling_prompt(name: str, token_ids: tuple[int, ...], pooling: Pooling | None = None) -> PromptState:
    return PromptState(name, f"request-{name}", token_ids, SamplingParams(max_tokens=1), pooling=pooling or Pooling())


def several(**params: Any) -> PromptState:
    return PromptState("a", "request-a", (1,), SamplingParams(1, **params), pooling=Pooling())


def answers(core: EncoderCore) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    while core.has_work():
        result = core.step()
        assert not result.failed
        found |= {pooled.prompt_id: pooled.values for pooled in result.pooled}
    return found


@torch.inference_mode()
def hidden_by_hand(path: Path, token_ids: tuple[int, ...], second: int | None = None) -> Any:
    """Return [num_tokens, hidden_size] float64."""
    types = torch.tensor([[int(second is not None and i >= second) for i in range(len(token_ids))]])
    network = AutoModel.from_pretrained(path).eval()
    return network(input_ids=torch.tensor([token_ids]), token_type_ids=types).last_hidden_state[0].double()


@pytest.mark.parametrize("how", ["mean", "cls", "last"])
def test_vectors_equal_transformers_whatever_else_is_in_the_batch(bert: Path, embedder: EncoderCore, how: str) -> None:
    for i, text in enumerate(TEXTS):
        embedder.add(pooling_prompt(str(i), text, Pooling(how=how, normalize=False)))

    found = answers(embedder)

    for i, text in enumerate(TEXTS):
        hidden = hidden_by_hand(bert, text)
        wanted = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[how]
        torch.testing.assert_close(torch.tensor(found[str(i)], dtype=torch.float64), wanted, rtol=1e-4, atol=1e-5)


def test_vectors_of_tokens_equal_transformers(bert: Path, embedder: EncoderCore) -> None:
    for i, text in enumerate(TEXTS):
        embedder.add(pooling_prompt(str(i), text, Pooling("token_embed", normalize=i % 2 == 0, dimensions=7)))

    found = answers(embedder)

    for i, text in enumerate(TEXTS):
        wanted = hidden_by_hand(bert, text)[:, :7]
        wanted = torch.nn.functional.normalize(wanted, dim=1) if i % 2 == 0 else wanted
        rows = torch.tensor(found[str(i)], dtype=torch.float64).view(len(text), 7)
        torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-5)


def test_the_second_text_of_a_pair_has_its_own_token_type(bert: Path, embedder: EncoderCore) -> None:
    embedder.add(pooling_prompt("pair", TEXTS[2], Pooling(how="cls", normalize=False, second_text=6)))

    wanted = hidden_by_hand(bert, TEXTS[2], second=6)[0]
    torch.testing.assert_close(torch.tensor(answers(embedder)["pair"]).double(), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(wanted, hidden_by_hand(bert, TEXTS[2])[0], atol=1e-3)


def test_scores_are_the_sigmoid_of_the_one_logit(cross_encoder: Path) -> None:
    core = core_of(cross_encoder)
    for i, text in enumerate(TEXTS):
        core.add(pooling_prompt(str(i), text, Pooling("classify", second_text=2)))

    found = answers(core)
    core.close()

    network = AutoModelForSequenceClassification.from_pretrained(cross_encoder).eval()
    for i, text in enumerate(TEXTS):
        with torch.inference_mode():
            logit = float(network(input_ids=torch.tensor([text])).logits[0, 0])
        assert found[str(i)] == pytest.approx((1 / (1 + math.exp(-logit)),), rel=1e-4)
    assert max(found.values())[0] - min(found.values())[0] > 1e-3


def test_batches_stay_within_both_limits(bert: Path) -> None:
    core = core_of(bert, seqs=3, tokens=40)
    for i, text in enumerate(TEXTS):
        core.add(pooling_prompt(str(i), text))

    sizes = []
    while core.has_work():
        sizes.append([len(TEXTS[int(pooled.prompt_id)]) for pooled in core.step().pooled])
    core.close()

    assert sizes == [[3, 10], [17], [24], [31], [38]]


def test_dimensions_are_truncated_before_normalisation() -> None:
    settings = PoolingSettings("mean", normalize=True)

    cut = finish_vector((3.0, 4.0, 12.0), Pooling(dimensions=2), settings)

    assert cut == (0.6, 0.8)
    assert finish_vector((3.0, 4.0), Pooling(normalize=False), settings) == (3.0, 4.0)
    assert finish_vector((0.0, 0.0), Pooling(), settings) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (pooling_prompt("a", (1,) * 65), PromptTooLong, "65 tokens, but the model allows 1 to 64"),
        (pooling_prompt("a", (1, VOCABULARY)), InvalidRequest, f"token id {VOCABULARY} is outside the vocabulary"),
        (
            pooling_prompt("a", (1,), Pooling(dimensions=25)),
            InvalidRequest,
            "dimensions is 25, but the model's vectors have 24",
        ),
        (several(n=3), InvalidRequest, "n is 3, but must be 1 with pooling"),
        (several(best_of=2), InvalidRequest, "best_of is 2, but must be 1 with pooling"),
        (
            pooling_prompt("a", (1,), Pooling("classify")),
            InvalidRequest,
            "task is classify, but bert supports only embed and",
        ),
        (PromptState("a", "r", (1,), SamplingParams(max_tokens=1)), InvalidRequest, "generates no text"),
    ],
)
def test_an_unsupported_request_is_refused_with_a_reason(
    embedder: EncoderCore, state: PromptState, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        embedder.add(state)

    assert not embedder.has_work()


def test_a_failed_batch_ends_its_texts_and_no_others(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(bert, seqs=1)
    core.add(pooling_prompt("bad", TEXTS[0]))
    core.add(pooling_prompt("good", TEXTS[1]))
    encoder = core._encoder
    with monkeypatch.context() as patch:
        patch.setattr(type(encoder), "run", lambda *_: 1 / 0)
        ((name, error),) = core.step().failed

    assert (name, type(error)) == ("bad", InternalError)
    assert list(answers(core)) == ["good"]
    core.close()


def test_an_answer_with_nan_ends_only_its_own_text(embedder: EncoderCore, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder.add(pooling_prompt("bad", TEXTS[0]))
    embedder.add(pooling_prompt("good", TEXTS[1]))
    run = embedder._encoder.run
    monkeypatch.setattr(embedder._encoder, "run", lambda states: [(0.5, math.nan), *run(states)[1:]])

    result = embedder.step()

    ((name, error),) = result.failed
    assert (name, type(error)) == ("bad", InternalError)
    assert "the model's result for this text has nan among its 2 values" in str(error)
    assert [one.prompt_id for one in result.pooled] == ["good"]


def test_a_cancelled_text_is_never_answered(embedder: EncoderCore) -> None:
    embedder.add(pooling_prompt("gone", TEXTS[0]))
    embedder.add(pooling_prompt("stays", TEXTS[1]))

    assert [(ending.prompt_id, ending.finish) for ending in embedder.cancel("gone")] == [("gone", "cancelled")]
    assert embedder.cancel("gone") == ()
    assert list(answers(embedder)) == ["stays"]


@pytest.mark.parametrize(("mode", "how"), [("mean", "mean"), ("cls", "cls"), ("last", "last")])
def test_the_folder_sets_the_pooling(tmp_path: Path, mode: str, how: str) -> None:
    write_pooling(tmp_path, mode, normalize=mode == "mean", max_length=32)

    assert read_settings(tmp_path, is_decoder=False) == PoolingSettings(how, mode == "mean", 32)


def test_a_folder_without_pooling_config_has_its_kinds_default(tmp_path: Path) -> None:
    assert read_settings(tmp_path, is_decoder=True) == PoolingSettings("last", normalize=True)
    assert read_settings(tmp_path, is_decoder=False) == PoolingSettings("cls", normalize=True)


def test_other_ways_of_pooling_are_refused_by_name(tmp_path: Path) -> None:
    write_pooling(tmp_path, "max", normalize=False)

    with pytest.raises(ConfigError, match="pooling_mode_max_tokens is not supported"):
        read_settings(tmp_path, is_decoder=False)


def test_the_longest_text_is_the_smaller_of_both_limits(tmp_path: Path) -> None:
    write_pooling(make_bert(tmp_path / "m"), "mean", normalize=True, max_length=32)

    assert load_encoder(tmp_path / "m", dtype="float32")[0].info.max_length == 32
    assert load_encoder(make_cross_encoder(tmp_path / "x"), dtype="float32")[0].info.max_length == 64
    with pytest.raises(ConfigError, match="--max-model-len is 33, but must be from 1 to the model's 32"):
        load_encoder(tmp_path / "m", dtype="float32", max_model_len=33)


def test_encoders_are_recognised_by_their_config(tmp_path: Path, bert: Path, cross_encoder: Path) -> None:
    decoders = {
        "llama": LlamaConfig(architectures=["LlamaForCausalLM"]),
        "e5": MistralConfig(architectures=["MistralModel"]),
        "t5": T5Config(architectures=["T5ForConditionalGeneration"]),
    }
    for name, config in decoders.items():
        config.save_pretrained(tmp_path / name)

    assert is_encoder(bert)
    assert is_encoder(cross_encoder)
    assert [is_encoder(tmp_path / name) for name in decoders] == [False, False, False]
