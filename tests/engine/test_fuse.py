"""Fused networks: logits equal transformers' in any batch; unknown networks are unchanged; originals are freed."""

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.added_biases import add_biases
from engine.attention.cpu import CpuAttention
from engine.attention.interface import AttentionBackend
from engine.attention.paged import LayerPool
from engine.attention.reference import ReferenceAttention
from engine.attention.registered import NAME, register
from engine.checkpoints.stored_weights import StoredWeights
from engine.fused.decoder import FusedDecoder, FusedWeights, Reduce
from engine.fused.fuse import fuse
from engine.fused.program import instructions
from engine.fused.structs import DecoderFault, Operation
from engine.fused.weights import PackedMemory
from engine.loader import load_model
from engine.step import BatchSequence, SampleRow, StepBatch
from engine.step_metadata import build
from native.engine_library import Threads, build_engine
from tests.engine.step_runner import GREEDY
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model

_KINDS = ("llama", "llama3", "qwen2", "qwen3", "mistral", "mistral-sliding")
_BLOCK_SIZE, _NUM_BLOCKS = 16, 24
_PROMPTS = ([5, 9, 200, 31], list(range(40, 90)), [7])


@pytest.fixture(scope="module")
def threads(native_libraries: None) -> Iterator[Threads]:
    library = build_engine()
    if library.isas[-1] == "plain":
        pytest.skip("this CPU has none of the instruction sets that are used")
    with library.threads(2) as team:
        yield team


def _network(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the tiny model; its vectors (biases, norms) are as random as its matrices."""
    register()
    network = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=NAME, local_files_only=True)
    numbers = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn(parameter.shape, generator=numbers).to(dtype) / 4
    return network.eval()


def test_one_row_may_be_sampled_more_often_than_the_step_has_rows(threads: Threads, tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    model = load_model(path, dtype="float32", block_size=_BLOCK_SIZE, kv_cache_memory=1 << 20, num_threads=2).model
    rows = tuple(SampleRow(2, GREEDY, number, 0) for number in range(200))
    batch = StepBatch((5, 9, 200), (BatchSequence(0, 3, (0,)),), (SampleRow(0, GREEDY, 0, 0), *rows))

    first, *others = model.logits(batch).clone()

    assert all(torch.equal(one, others[0]) for one in others)
    assert not torch.equal(first, others[0])
    alone = StepBatch(batch.token_ids, batch.sequences, (SampleRow(2, GREEDY, 0, 0),))
    assert torch.equal(model.logits(alone)[0], others[0])
    model.close()


def _fuse_network(network: Any, threads: Threads) -> FusedWeights:
    weights = fuse(network, threads=threads)
    assert weights is not None
    return weights


def _decoder(weights: FusedWeights, backend: AttentionBackend, reduce: Reduce | None = None) -> FusedDecoder:
    decoder = weights.decoder
    shape = (_NUM_BLOCKS * _BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim)
    pools = [LayerPool(*(torch.zeros(shape, dtype=weights.dtype) for _ in range(2))) for _ in weights.layers]
    return FusedDecoder(weights, pools, backend, reduce=reduce)


def _run(
    decoder: FusedDecoder, parts: Sequence[tuple[Sequence[int], int]], layer_done: Callable[[int], None] | None = None
) -> torch.Tensor:
    """Run one step of (tokens so far, how many of them are new); sequence i has blocks i, i + 3, ...

    Return the logits of each sequence's last row.
    """
    ids: list[int] = []
    sequences, samples = [], []
    for index, (tokens, count) in enumerate(parts):
        ids += tokens[len(tokens) - count :]
        sequences.append(BatchSequence(len(tokens) - count, count, tuple(range(index, _NUM_BLOCKS, 3))))
        samples.append(SampleRow(len(ids) - 1, GREEDY, 0, 0))
    batch = StepBatch(tuple(ids), tuple(sequences), tuple(samples))
    with torch.inference_mode():
        return decoder.run(build(batch, block_size=_BLOCK_SIZE, device=torch.device("cpu")), layer_done).clone()


def _expected(network: Any, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the last logits of each prompt, by transformers' own attention."""
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        return torch.stack([network(torch.tensor([list(prompt)])).logits[0, -1] for prompt in prompts])


@pytest.mark.combinations(1)
@pytest.mark.parametrize("backend", [ReferenceAttention, CpuAttention])
@pytest.mark.parametrize("kind", _KINDS)
def test_logits_are_those_of_transformers(
    kind: str, backend: Callable[[], AttentionBackend], threads: Threads, tmp_path: Path
) -> None:
    path = make_tiny_model(kind, tmp_path)
    expected = _expected(_network(path), [*_PROMPTS, *(prompt[:-1] for prompt in _PROMPTS[:2])])
    decoder = _decoder(_fuse_network(_network(path), threads), backend())

    before = _run(decoder, [(prompt[:-1], len(prompt) - 1) for prompt in _PROMPTS[:2]])
    after = _run(decoder, [(_PROMPTS[0], 1), (_PROMPTS[1], 1), (_PROMPTS[2], 1)])

    torch.testing.assert_close(after, expected[:3], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(before, expected[3:5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes_that_fill_no_vector_and_biases_everywhere(dtype: torch.dtype, threads: Threads) -> None:
    config = LlamaConfig(
        vocab_size=243, hidden_size=78, intermediate_size=106, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=48, attention_bias=True, mlp_bias=True, max_position_embeddings=128,
    )  # fmt: skip
    register()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME).eval()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(std=0.15)
    expected = _expected(network, _PROMPTS)
    network.set_attn_implementation(NAME)

    got = _run(
        _decoder(_fuse_network(network, threads), CpuAttention()), [(prompt, len(prompt)) for prompt in _PROMPTS]
    )

    assert float((got - expected).norm() / expected.norm()) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_bfloat16_differs_from_transformers_by_roundings(kind: str, threads: Threads, tmp_path: Path) -> None:
    path = make_tiny_model(kind, tmp_path)
    expected = _expected(_network(path, torch.bfloat16), _PROMPTS).float()
    exact = _expected(_network(path, torch.bfloat16).float(), _PROMPTS)
    decoder = _decoder(_fuse_network(_network(path, torch.bfloat16), threads), CpuAttention())

    got = _run(decoder, [(prompt, len(prompt)) for prompt in _PROMPTS])

    assert torch.equal(got, got.bfloat16().float())
    assert float((got - exact).norm()) < 1.5 * float((expected - exact).norm())  # no worse than transformers itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_do_not_depend_on_neighbours_or_chunks(dtype: torch.dtype, threads: Threads, tmp_path: Path) -> None:
    weights = _fuse_network(_network(make_tiny_model("qwen3", tmp_path), dtype), threads)
    together = _run(_decoder(weights, CpuAttention()), [(prompt, len(prompt)) for prompt in _PROMPTS])
    alone, prompt = _decoder(weights, CpuAttention()), _PROMPTS[1]

    for end in (1, 18, 19):
        _run(alone, [(prompt[:end], {1: 1, 18: 17, 19: 1}[end])])
    last = _run(alone, [(prompt, len(prompt) - 19)])

    assert torch.equal(last[0], together[1])


@pytest.mark.parametrize("tied", [False, True])
def test_the_originals_are_freed(tied: bool, threads: Threads, tmp_path: Path) -> None:
    network = _network(make_tiny_model("llama", tmp_path))
    if tied:
        network.lm_head.weight = network.model.embed_tokens.weight
        network.config.tie_word_embeddings = True
    expected = _expected_here(network)

    weights = _fuse_network(network, threads)

    kept = sum(parameter.numel() for name, parameter in network.named_parameters() if "norm" not in name)
    assert kept == (0 if tied else VOCAB_SIZE * 64)
    torch.testing.assert_close(
        _run(_decoder(weights, CpuAttention()), [(_PROMPTS[1], 50)]), expected, rtol=1e-4, atol=1e-4
    )


def _expected_here(network: Any) -> torch.Tensor:
    expected = _expected(network, [_PROMPTS[1]])
    network.set_attn_implementation(NAME)
    return expected


@pytest.mark.parametrize("backend", [ReferenceAttention, CpuAttention])
def test_layers_are_reported_in_order_after_their_kv_is_written(
    backend: Callable[[], AttentionBackend], threads: Threads, tmp_path: Path
) -> None:
    decoder = _decoder(_fuse_network(_network(make_tiny_model("llama", tmp_path)), threads), backend())
    reported: list[tuple[int, bool]] = []

    _run(decoder, [([9], 1)], lambda layer: reported.append((layer, bool(decoder._pools[layer].keys[0].any()))))

    assert reported == [(0, True), (1, True)]


@pytest.mark.parametrize("backend", [ReferenceAttention, CpuAttention])
def test_an_error_in_layer_done_is_raised(
    backend: Callable[[], AttentionBackend], threads: Threads, tmp_path: Path
) -> None:
    decoder = _decoder(_fuse_network(_network(make_tiny_model("llama", tmp_path)), threads), backend())

    def fail(layer: int) -> None:
        raise LookupError(f"layer {layer}")

    with pytest.raises(LookupError, match="layer 0"):
        _run(decoder, [([9], 1)], fail)
    _run(decoder, [([9], 1)])


def test_indices_outside_their_tables_are_refused(threads: Threads, tmp_path: Path) -> None:
    network = _network(make_tiny_model("llama", tmp_path))
    network.lm_head.weight = network.model.embed_tokens.weight
    decoder = _decoder(_fuse_network(network, threads), CpuAttention())

    with pytest.raises(IndexError, match=f"{VOCAB_SIZE} is outside a vocabulary of {VOCAB_SIZE}"):
        _run(decoder, [([VOCAB_SIZE], 1)])
    with pytest.raises(IndexError, match=f"id -1 is outside a vocabulary of {VOCAB_SIZE}"):
        _run(decoder, [([3, -1, 7], 3)])
    outside = StepBatch((3,), (BatchSequence(0, 1, (_NUM_BLOCKS,)),), ())
    with pytest.raises(IndexError, match="slot"), torch.inference_mode():
        decoder.run(build(outside, block_size=_BLOCK_SIZE, device=torch.device("cpu")))


@pytest.mark.parametrize("token", [250, 255, 256, 1 << 31, 1 << 62])
def test_ids_between_the_vocabulary_and_a_whole_panel_are_refused(token: int, threads: Threads) -> None:
    config = LlamaConfig(
        vocab_size=250, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    register()
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=NAME).eval()
    decoder = _decoder(_fuse_network(network, threads), CpuAttention())

    _run(decoder, [([249], 1)])
    with pytest.raises(IndexError, match=f"id {token} is outside a vocabulary of 250"):
        _run(decoder, [([249, token], 2)])


def test_a_program_that_attends_without_attention_is_refused(threads: Threads, tmp_path: Path) -> None:
    weights = _fuse_network(_network(make_tiny_model("llama", tmp_path)), threads)
    attend = instructions([(Operation.ATTEND, 0)])
    none, other_rows = _decoder(weights, ReferenceAttention()), _decoder(weights, CpuAttention())
    _run(none, [([5, 9], 2)])
    _run(other_rows, [([5, 9], 2)])
    other_rows._memory.reserve(3, 1)  # more rows than the sequences have

    for decoder in (none, other_rows):
        with pytest.raises(ValueError, match=f"refused: fault {int(DecoderFault.PROGRAM)}"):
            decoder._call(attend)


def test_a_program_over_no_layers_is_refused(threads: Threads, tmp_path: Path) -> None:
    weights = _fuse_network(_network(make_tiny_model("llama", tmp_path)), threads)
    decoder = _decoder(weights, ReferenceAttention())
    weights.decoder.num_layers, weights.decoder.layers = 0, None

    with pytest.raises(ValueError, match=f"refused: fault {int(DecoderFault.PROGRAM)}"):
        decoder._call(instructions([(Operation.HEAD, 0)]))


def test_a_layer_runs_alone_where_the_program_attends_otherwise(threads: Threads, tmp_path: Path) -> None:
    weights = _fuse_network(_network(make_tiny_model("llama", tmp_path)), threads)
    metadata = build(
        StepBatch((5, 9), (BatchSequence(0, 2, (0,)),), ()), block_size=_BLOCK_SIZE, device=torch.device("cpu")
    )
    rows = torch.randn(2, weights.sizes.hidden, generator=torch.Generator().manual_seed(3))

    got = [_decoder(weights, backend()).run_layer(0, metadata, rows) for backend in (CpuAttention, ReferenceAttention)]

    torch.testing.assert_close(got[0], got[1], rtol=1e-4, atol=1e-5)


def test_an_unknown_network_is_left_unchanged(threads: Threads, tmp_path: Path) -> None:
    network = _network(make_tiny_model("opt", tmp_path))
    expected = _expected_here(network)

    assert fuse(network, threads=threads) is None
    torch.testing.assert_close(_expected_here(network), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["model.layers.1.input_layernorm", "model.norm"])
def test_norms_that_add_a_small_bias_are_not_fused(norm: str, threads: Threads, tmp_path: Path) -> None:
    network = _network(make_tiny_model("llama", tmp_path / "llama"), torch.bfloat16)
    save_file({f"{norm}.bias": torch.full((64,), 1e-4)}, tmp_path / "model.safetensors")
    add_biases(network, StoredWeights(tmp_path))

    assert fuse(network, threads=threads) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("packed", "what"), [(0, "layer 0"), (1, "layer 1"), (2, "the output layer")])
def test_if_a_layer_disagrees_the_whole_network_is_left_unchanged(
    packed: int, what: str, dtype: torch.dtype, threads: Threads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    network = _network(make_tiny_model("qwen2", tmp_path), dtype)
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    pack, calls = PackedMemory.pack, itertools.count()

    def wrong(memory: PackedMemory, weights: Any, finish: Any) -> Any:
        joined = [copy.deepcopy(linear) for linear in weights]
        if next(calls) // 4 == packed:
            joined[-1].weight *= -1
        return pack(memory, joined, finish)

    monkeypatch.setattr(PackedMemory, "pack", wrong)
    monkeypatch.setattr("engine.fused.fuse.lay_out", lambda network: None)  # it would pack the output layer itself

    assert fuse(network, threads=threads) is None
    assert f"{what} differs" in caplog.text
    assert all(torch.equal(parameter, before[name]) for name, parameter in network.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_that_add_nothing_are_fused(dtype: torch.dtype, threads: Threads, tmp_path: Path) -> None:
    network = _network(make_tiny_model("llama", tmp_path), dtype)
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    expected = _expected(network, _PROMPTS)
    network.set_attn_implementation(NAME)

    got = _run(
        _decoder(_fuse_network(network, threads), CpuAttention()), [(prompt, len(prompt)) for prompt in _PROMPTS]
    )

    assert float((got - expected).norm() / expected.norm()) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_ranks_sum_their_halves(threads: Threads, tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    expected = _expected(_network(path), _PROMPTS)
    meeting = _Meeting()
    team = [_Rank(_half(_network(path), rank), rank, threads.library.threads(1), meeting) for rank in range(2)]

    workers = [threading.Thread(target=rank.run) for rank in team]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=300)

    for rank in team:
        assert rank.logits is not None
        torch.testing.assert_close(rank.logits, expected, rtol=1e-4, atol=1e-4)


def _half(network: Any, rank: int) -> Any:
    """Keep one rank's heads and inner columns of every layer."""
    for layer in network.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            linear.weight.data = linear.weight.data.chunk(2, dim=0)[rank].contiguous()
            linear.out_features //= 2
        for linear in (attention.o_proj, mlp.down_proj):
            linear.weight.data = linear.weight.data.chunk(2, dim=1)[rank].contiguous()
            linear.in_features //= 2
    return network


class _Meeting:
    """Where two ranks put their parts of a sum."""

    def __init__(self) -> None:
        self.parts = [torch.empty(0), torch.empty(0)]
        self.barrier = threading.Barrier(2)


class _Rank:
    """One of two ranks, each in a thread."""

    def __init__(self, network: Any, rank: int, threads: Threads, meeting: _Meeting) -> None:
        self.decoder = _decoder(_fuse_network(network, threads), CpuAttention(), self.sum)
        self.logits: torch.Tensor | None = None
        self._rank, self._meeting = rank, meeting

    def sum(self, partial: torch.Tensor) -> None:
        self._meeting.parts[self._rank] = partial.clone()
        self._meeting.barrier.wait(timeout=300)
        partial.copy_(self._meeting.parts[0] + self._meeting.parts[1])
        self._meeting.barrier.wait(timeout=300)

    def run(self) -> None:
        self.logits = _run(self.decoder, [(prompt, len(prompt)) for prompt in _PROMPTS])
