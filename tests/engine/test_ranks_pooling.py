"""Vectors under tensor parallelism equal transformers' own, and a rank's part is checked as a whole model is."""

import functools
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel, AutoModelForCausalLM, MistralConfig, MistralModel

from engine import row_check
from engine.attention.registered import register
from engine.checkpoints.materialise import DimensionRanges
from engine.core import EngineCore
from engine.model_folder import open_folder, read_network
from engine.ranks.load import RanksOptions, load_ranks
from engine.sharding.cut import shard_network
from tests.engine.test_core_pooling import TEXTS, close, pooling_prompt, states_by_hand, vectors
from tests.engine.tiny_encoders import write_pooling
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_tokenizer
from wire.errors import ConfigError, PdserveError
from wire.kv_layout import Rank
from wire.types import Pooling, PromptState, SamplingParams

_POOL_BYTES = 2 << 20


def _found(path: Path, pooling: Pooling, *, with_generation: bool) -> dict[str, tuple[float, ...]]:
    """Return the vectors of all texts by two ranks, in chunks, perhaps with a prompt that generates beside them."""
    lost: list[PdserveError] = []
    options = RanksOptions(cores=((), ()), num_threads=1, step_s=30.0)
    model = load_ranks(
        path, dtype="float32", block_size=16, kv_cache_memory=_POOL_BYTES, ranks=options, on_lost=lost.append
    ).model  # fmt: skip
    core = EngineCore(model, max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=24)
    try:
        if with_generation:
            core.add(PromptState("text", "r", TEXTS[1], SamplingParams(max_tokens=12, temperature=0.0)))
        for number, text in enumerate(TEXTS):
            core.add(pooling_prompt(str(number), text, pooling))
        found, _, _ = vectors(core)
    finally:
        core.close()
    assert not lost
    return found


@pytest.mark.long
def test_two_ranks_vectors_equal_transformers_beside_a_prompt(tmp_path: Path) -> None:
    path = make_family("llama", tmp_path)
    network = AutoModelForCausalLM.from_pretrained(path).eval().get_decoder()

    found = _found(path, Pooling(how="mean", normalize=False), with_generation=True)

    for number, text in enumerate(TEXTS):
        close(found[str(number)], states_by_hand(network, text).mean(0))


@pytest.mark.long
def test_two_ranks_make_vectors_without_an_output_layer(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=None, tie_word_embeddings=False,
    )  # fmt: skip
    MistralModel(config).eval().save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    write_pooling(tmp_path, "last", normalize=True)
    network = AutoModel.from_pretrained(tmp_path).eval()

    found = _found(tmp_path, Pooling(), with_generation=False)

    for number, text in enumerate(TEXTS):
        last = states_by_hand(network, text)[-1]
        close(found[str(number)], last / last.norm())


def _cut(network: Any, config: Any, number: int, *, state: bool = False) -> dict[str, DimensionRanges]:
    if state:  # each row has something of those before it
        network.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.cumsum(1))
    return shard_network(network, config, Rank(number, 2), lambda tensor: None)


@pytest.mark.parametrize("number", [0, 1])
def test_an_unknown_module_is_checked_for_row_independence(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    asked_of = list[str]()
    check_rows = row_check.check_rows

    def check(network: Any, dtype: str) -> None:
        asked_of.append(network.config.model_type)
        check_rows(network, dtype)

    monkeypatch.setattr(row_check, "check_rows", check)
    folder = open_folder(make_family("arcee", tmp_path))

    read_network(folder, "float32", functools.partial(_cut, config=folder.checkpoint.text_config, number=number))

    assert asked_of == ["arcee"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_state_outside_attention_is_found_on_a_shard(number: int, tmp_path: Path) -> None:
    register()
    folder = open_folder(make_family("arcee", tmp_path))
    shard = functools.partial(_cut, config=folder.checkpoint.text_config, number=number, state=True)

    with pytest.raises(ConfigError, match=r"arcee: logits differ .* keep a state besides attention"):
        read_network(folder, "float32", shard)
