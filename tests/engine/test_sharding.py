"""Sharding networks for ranks: heads and inner sizes are assigned whole, and together the ranks are the model."""

import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.checkpoints.checkpoint import open_checkpoint
from engine.checkpoints.stored_weights import StoredWeights
from engine.network import build_network, load_network
from engine.oracle import load_plain
from engine.sharding.cut import check_shards, shard_network
from engine.sharding.hooks import num_reductions
from engine.sharding.shares import share_heads, share_inner
from tests.engine.rank_logits import rank_logits
from tests.engine.tiny_families import NAMED, OTHERS, make_family
from tests.engine.tiny_quantised import Scheme, awq, gptq, modelslim, quantise_checkpoint, shift_norms, w8a8
from wire.errors import ConfigError
from wire.kv_layout import Rank, head_range

_REFUSED = {"gpt2": "0 of 4 layers"}
_WHOLE_MATRICES = {
    "self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "mlp.gate.weight", "mlp.router.weight",
    "mlp.experts.down_proj_bias",
}  # fmt: skip
_OTHERS_CUT = (
    "apertus", "arcee", "axk1", "cohere2_moe", "cwm", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "helium", "hyperclovax", "jais2", "minicpm3",
    "minimax_m2", "ministral", "ministral3", "nanochat", "nemotron", "olmo", "olmo3", "olmoe", "phi", "seed_oss",
    "solar_open", "vaultgemma", "youtu",
)  # fmt: skip


def _refusal(path: Path) -> str | None:
    checkpoint = open_checkpoint(path)
    try:
        check_shards(build_network(checkpoint, dtype="float32", attention=None), checkpoint.text_config, 2)
    except ConfigError as error:
        return str(error)
    return None


def _assert_ranks_are_the_model(path: Path, num_ranks: int) -> None:
    checkpoint = open_checkpoint(path)
    token_ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = load_plain(path, "float32")(input_ids=token_ids, use_cache=False).logits

    check_shards(build_network(checkpoint, dtype="float32", attention=None), checkpoint.text_config, num_ranks)
    own, *others = rank_logits(path, num_ranks, token_ids)

    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
    tied = checkpoint.text_config.tie_word_embeddings
    assert all(other.shape[-1] == (checkpoint.text_config.vocab_size if tied else 16) for other in others)


@given(
    kv_heads=st.integers(1, 12), group=st.integers(1, 8), num_ranks=st.integers(1, 24), size=st.integers(1, 5000)
)  # fmt: skip
def test_every_head_and_inner_element_has_one_owner(kv_heads: int, group: int, num_ranks: int, size: int) -> None:
    ranks = [Rank(number, num_ranks) for number in range(num_ranks)]
    try:
        shares = [share_heads(kv_heads * group, kv_heads, rank) for rank in ranks]
    except ConfigError:
        assert num_ranks > kv_heads
        assert max(range(kv_heads), key=lambda head: sum(head_range(kv_heads, r).start == head for r in ranks)) >= 0
        assert -(-num_ranks // kv_heads) > group
    else:
        dealt = [head for share in shares for head in range(*share.query)]
        assert dealt == list(range(kv_heads * group))
        assert all(share.kv == head_range(kv_heads, rank) for share, rank in zip(shares, ranks, strict=True))
        assert all(
            share.kv.start <= head // group < share.kv.end for share in shares for head in range(*share.query)
        )  # fmt: skip
    if size >= num_ranks:
        ranges = [share_inner("mlp", size, rank) for rank in ranks]
        assert [end for _, end in ranges[:-1]] == [start for start, _ in ranges[1:]]
        assert (ranges[0][0], ranges[-1][1]) == (0, size)
        assert all(start < end for start, end in ranges)


def test_the_default_models_heads_are_split_unevenly() -> None:
    shares = [share_heads(9, 3, Rank(number, 2)) for number in range(2)]

    assert [tuple(share.query) for share in shares] == [(0, 6), (6, 9)]
    assert [tuple(share.kv) for share in shares] == [(0, 2), (2, 3)]
    assert [share_inner("mlp", 1536, Rank(number, 2)) for number in range(2)] == [(0, 768), (768, 1536)]


def test_too_many_ranks_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"4 query heads in 2 KV groups of 2 are too few for 5 ranks"):
        share_heads(4, 2, Rank(0, 5))
    with pytest.raises(ConfigError, match=r"mlp.up_proj: an inner size of 3 cannot be split over 4 ranks"):
        share_inner("mlp.up_proj", 3, Rank(0, 4))
    with pytest.raises(ConfigError, match=r"7 query heads do not divide into 2 KV heads"):
        share_heads(7, 2, Rank(0, 2))


@pytest.mark.combinations(1)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_ranks_together_are_the_model(tmp_path: Path, kind: str, num_ranks: int) -> None:
    _assert_ranks_are_the_model(make_family(kind, tmp_path), num_ranks)


@pytest.mark.often("deepseek_v2", "gpt_oss", "gpt_neox", "opt")
@pytest.mark.often("phi3", "gpt_neox", "mixtral", "gpt_oss", "cohere2", "opt", "gemma2", "deepseek_v2")
@pytest.mark.parametrize("kind", sorted(NAMED.keys() - _REFUSED.keys() - {"llama", "qwen2", "qwen3"}))
def test_two_ranks_are_the_model_whatever_its_family(tmp_path: Path, kind: str) -> None:
    _assert_ranks_are_the_model(make_family(kind, tmp_path), 2)


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_a_rarer_family_is_sharded_exactly_or_refused(tmp_path: Path, kind: str) -> None:
    path = make_family(kind, tmp_path)

    refusal = _refusal(path)

    if refusal is None:
        _assert_ranks_are_the_model(path, 2)
    else:
        assert "--tensor-parallel-size 1" in refusal
        assert kind not in _OTHERS_CUT, refusal


@pytest.mark.often("gpt_oss", "gpt_neox", "deepseek_v2")
@pytest.mark.parametrize("kind", ["olmo2", "gpt_oss", "opt", "gpt_neox", "deepseek_v2"])
def test_three_ranks_with_heads_of_their_own_kind_are_the_model(tmp_path: Path, kind: str) -> None:
    """Of two KV heads one is repeated; of four one rank has two."""
    _assert_ranks_are_the_model(make_family(kind, tmp_path), 3)


def test_uneven_heads_and_biases_are_the_model(tmp_path: Path) -> None:
    settings = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 99}
    settings |= {"attention_bias": True, "mlp_bias": True}
    path = make_family("llama", tmp_path, **settings)

    _assert_ranks_are_the_model(path, 2)


@pytest.mark.parametrize(
    "scheme",
    [awq(32), gptq(4, 32), gptq(4, 32, act_order=True), w8a8("channel"), modelslim("W8A8")],
    ids=lambda s: s.name,
)
def test_ranks_of_a_quantised_checkpoint_are_the_model(tmp_path: Path, scheme: Scheme) -> None:
    path = make_family("llama", tmp_path)
    plain = load_plain(path, "float32")
    plain.load_state_dict(weights := quantise_checkpoint(scheme, path))
    if scheme.method == "modelslim":
        shift_norms(path, weights)  # with biases that compensate each other
    token_ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = plain(input_ids=token_ids, use_cache=False).logits

    own, _ = rank_logits(path, 2, token_ids)

    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


def test_a_bias_that_modelslim_adds_to_a_norm_over_all_heads_is_cut(tmp_path: Path) -> None:
    path = make_family("olmo2", tmp_path)
    stored = quantise_checkpoint(modelslim("W8A8"), path)
    norms = [name for name in stored if name.endswith(("q_norm.weight", "k_norm.weight"))]
    biases = {name.replace("weight", "bias"): torch.linspace(-1, 1, len(stored[name])) for name in norms}
    file = path / "model.safetensors"
    save_file(load_file(file) | biases, file, metadata={"format": "pt"})

    _assert_ranks_are_the_model(path, 3)


@pytest.mark.parametrize("kind", sorted(_REFUSED))
def test_unshardable_models_are_refused_before_weights_load(tmp_path: Path, kind: str) -> None:
    checkpoint = open_checkpoint(make_family(kind, tmp_path))
    network = build_network(checkpoint, dtype="float32", attention=None)

    with pytest.raises(ConfigError, match=_REFUSED[kind]) as refused:
        check_shards(network, checkpoint.text_config, 2)
    assert "--tensor-parallel-size 1" in str(refused.value)


@pytest.mark.parametrize("kind", ["opt", "gpt_neox", "gpt_oss", "olmo2", "deepseek_v2", "deepseek_v3"])
def test_a_rank_of_any_family_reads_only_its_slices(tmp_path: Path, kind: str) -> None:
    path = make_family(kind, tmp_path)
    checkpoint = open_checkpoint(path)
    whole = {name: tuple(one.shape) for name, one in load_plain(path, "float32").state_dict().items()}

    for number in range(2):
        shard = functools.partial(
            shard_network, config=checkpoint.text_config, rank=Rank(number, 2), all_reduce=lambda tensor: None
        )  # fmt: skip
        with StoredWeights(path) as weights:
            network = load_network(checkpoint, weights, dtype="float32", attention=None, shard=shard).network

        held = {id(tensor): (name, tensor) for name, tensor in reversed(network.state_dict(keep_vars=True).items())}
        uncut = {n for n, one in held.values() if one.dim() > 1 and ".layers." in n and tuple(one.shape) == whole[n]}
        zeros = {name for name, _ in held.values() if number == 1 and name.endswith("down_proj_bias")}
        assert {name.rpartition(".layers.")[2].partition(".")[2] for name in uncut - zeros} <= _WHOLE_MATRICES
        assert weights.bytes_read == sum(tensor.nbytes for name, tensor in held.values() if name not in zeros)


def test_a_rank_reads_only_its_shard_and_whole_tensors(tmp_path: Path) -> None:
    path = make_family("llama", tmp_path)
    checkpoint = open_checkpoint(path)
    config = checkpoint.text_config
    cut = config.num_hidden_layers * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)  # q, o; k, v; gate, up, down
    whole = 320 * 64 + (2 * config.num_hidden_layers + 1) * 64  # the embedding, norms
    head = (320 * 64, 16 * 64)  # rank 1 has no use for it

    for number in range(2):
        shard = functools.partial(shard_network, config=config, rank=Rank(number, 2), all_reduce=lambda tensor: None)
        with StoredWeights(path) as weights:
            network = load_network(checkpoint, weights, dtype="float32", attention=None, shard=shard).network

        assert weights.bytes_read == 4 * (cut // 2 + whole + head[number])
        assert num_reductions(network) == 2 * config.num_hidden_layers
