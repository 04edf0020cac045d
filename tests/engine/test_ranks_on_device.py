"""Ranks on devices as one model: its engine's outputs equal the CPU's, over pools in their own processes."""

import dataclasses
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from devices import table
from devices.cpu import CpuDevice
from devices.device_pool import DevicePool
from engine.core import EngineCore
from engine.headroom import LargestStep
from engine.oracle import Oracle
from engine.ranks.load import LoadedRanks, RanksOptions, load_ranks
from engine.ranks.pools import plan_devices
from engine.ranks.team import OnLost
from engine.step import BatchSequence, SampleRow, StepBatch
from tests.devices.fake_device import CardKind
from tests.devices.tiny_traffic import PLENTY, Outputs, core_on, every_sort, ids, plain, run
from tests.engine.step_runner import GREEDY, generate
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import make_tiny_model
from tests.engine.tiny_quantised import awq, quantise_checkpoint
from wire.errors import ConfigError, InstanceLost, PdserveError
from wire.kv_layout import KvTensor

ROOT = Path(__file__).parents[2]
STEP_S = 2.0
BLOCK = 16
POOL = 30 * BLOCK * (2 * 2 * 2 * 16 * 4) + (8 << 12)  # bytes of 30 blocks: layers, k and v, heads, head_dim, float32
TENSORS = tuple(KvTensor(0, name, 3, 64, "float32") for name in "kv")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def fake_device() -> Iterator[None]:
    """The fake device, here and in the processes of ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(table.KINDS, "fake", CardKind())
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


def load(path: Path, on_lost: OnLost, *, kv_bytes: int | None = POOL, step_s: float = 30.0) -> LoadedRanks:
    options = RanksOptions(
        cores=((), ()), num_threads=1, step_s=step_s, device="fake", visible=("4", "7"),
        program="tests.devices.fake_rank", gpu_memory_utilization=0.01, largest_step=LargestStep(24, 4),
    )  # fmt: skip
    return load_ranks(
        path, dtype="float32", block_size=BLOCK, kv_cache_memory=kv_bytes, ranks=options, on_lost=on_lost
    )  # fmt: skip


@pytest.fixture(scope="module")
def two(path: Path) -> Iterator[LoadedRanks]:
    lost: list[PdserveError] = []
    loaded = load(path, lost.append)
    yield loaded
    loaded.model.close()
    assert not lost


@contextmanager
def core_over(loaded: LoadedRanks, swap_bytes: int = 0) -> Iterator[EngineCore]:
    core = EngineCore(
        loaded.model, max_num_seqs=16, max_num_batched_tokens=64, prefill_chunk_size=24, swap_bytes=swap_bytes
    )  # fmt: skip
    yield core
    core.blocks.check()
    assert core.blocks.num_used == 0


@pytest.mark.long
def test_requests_of_every_kind_are_answered_as_on_the_cpu(two: LoadedRanks, path: Path) -> None:
    with core_over(two) as core:
        for state in every_sort():
            core.add(state)
        outputs = run(core)
    with core_on(CpuDevice(), path, attention_backend="reference") as core:
        for state in every_sort():
            core.add(state)
        on_cpu = run(core)

    assert outputs.tokens == on_cpu.tokens
    for key, likely in outputs.logprobs.items():
        assert [one.logprob for one in likely] == pytest.approx([one.logprob for one in on_cpu.logprobs[key]], abs=1e-4)
    assert outputs.logprobs.keys() == on_cpu.logprobs.keys() != set()
    for name, vector in outputs.vectors.items():
        assert vector == pytest.approx(on_cpu.vectors[name], abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("swap_bytes", [0, PLENTY], ids=["recomputed", "swapped-out"])
def test_a_full_pool_changes_no_token(two: LoadedRanks, swap_bytes: int, path: Path) -> None:
    lengths = (90, 116, 75, 104)
    with core_over(two, swap_bytes) as core:
        for length in lengths:
            core.add(plain(str(length), length, max_tokens=60))
        outputs = run(core)

        assert core.load().preemptions > 0
    assert (outputs.swapped_out > 0) == (swap_bytes > 0)
    expected = Oracle(path, "float32").generate_greedy([ids(length) for length in lengths], 60, ignore_eos=True)
    assert [outputs.tokens[str(length), 0] for length in lengths] == expected


@pytest.mark.long
def test_a_prompt_takes_its_prefix_from_the_ranks_caches(two: LoadedRanks) -> None:
    with core_over(two) as core:
        core.add(plain("first", 200))
        first = run(core)
        core.add(plain("again", 200))
        again, num_tokens = Outputs(), 0
        while core.has_work():
            result = core.step()
            num_tokens += result.num_tokens
            again.take(result)

    assert again.tokens["again", 0] == first.tokens["first", 0]
    assert num_tokens < 200


@pytest.mark.long
def test_each_rank_has_its_pool_on_its_own_device(two: LoadedRanks) -> None:
    own, other = two.model.memories

    assert isinstance(own, DevicePool)
    assert (own.layout.rank.number, other.layout.rank.number, other.fd) == (0, 1, None)
    assert own.layout.num_blocks == other.layout.num_blocks == 30
    assert own.mark() is not None, "each layer that was computed is marked"
    assert any(note.startswith("rank 1 of 2 on fake:0: card 7: ") for note in two.notes)
    assert "2 ranks all-reduce over gloo" in two.notes
    with pytest.raises(TypeError, match="the KV pool of rank 1 of 2 is on a device of another process"):
        _ = other.buffer


def _notes_of_exact_ranks(path: Path) -> tuple[str, ...]:
    """Return the notes of ranks whose tokens equal those of transformers."""
    prompts, lost = [ids(length) for length in (5, 30)], list[PdserveError]()
    loaded = load(path, lost.append, kv_bytes=4 * POOL)
    try:
        got = generate(loaded.model, prompts, 12, chunk=16)
    finally:
        loaded.model.close()

    assert got == Oracle(path, "float32").generate_greedy(prompts, 12, ignore_eos=True)
    assert not lost
    return loaded.notes


@pytest.mark.long
def test_ranks_keep_quantised_layers_and_report_what_differs(tmp_path: Path) -> None:
    """Of three heads of 16 rank 1 has one, and int4pack supports 32 inputs or more: its output projections."""
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    path = make_family("llama", tmp_path, **sizes, intermediate_size=128)
    quantise_checkpoint(awq(32), path)
    notes = _notes_of_exact_ranks(path)

    (note,) = (note for note in notes if note.startswith("AWQ 4-bit, kept: "))
    assert note.startswith("AWQ 4-bit, kept: 28 of 28 quantised layers; this rank's weights take ")
    assert notes[notes.index("2 ranks all-reduce over gloo") + 3] == (
        "rank 1 of 2, unlike rank 0: kept: 24 of 28 quantised layers; 4 dequantised to float32: "
        "int4pack supports groups of 32, 64, 128, 256 inputs, not 16"
    )


@pytest.mark.long
def test_ranks_keep_quantised_experts(tmp_path: Path) -> None:
    path = make_family("mixtral", tmp_path, num_hidden_layers=2)
    quantise_checkpoint(dataclasses.replace(awq(32), ignore=("lm_head", "gate")), path)
    notes = _notes_of_exact_ranks(path)

    assert any(note.startswith("AWQ 4-bit, kept: 32 of 32 quantised layers; this rank's ") for note in notes)


@pytest.mark.long
def test_a_stopped_rank_ends_the_model_within_the_step_limit(path: Path) -> None:
    lost: Future[PdserveError] = Future()
    loaded = load(path, lost.set_result, kv_bytes=None, step_s=STEP_S)
    (pid,) = loaded.model.rank_pids
    psutil.Process(pid).send_signal(signal.SIGSTOP)
    step = StepBatch((5, 6, 7), (BatchSequence(0, 3, (1,)),), (SampleRow(2, GREEDY, 0, 0),))

    with pytest.raises(InstanceLost, match=rf"rank 1 of 2 \(pid {pid}\) is stopped by a signal"):
        loaded.model.launch(step)

    assert f"pid {pid}" in str(lost.result(STEP_S))
    assert any(" MiB left for steps: " in note for note in loaded.notes), "no note has the sizes of the pools"
    loaded.model.close()


def test_the_fullest_device_limits_every_pools_blocks() -> None:
    large, full = 1 << 20, 300_000

    plan = plan_devices(TENSORS, [large, full], None, BLOCK, 4096)
    swapped = plan_devices(TENSORS, [full, large], None, BLOCK, 4096)

    assert plan.num_blocks == (full - 2 * 4095) // (BLOCK * 2 * 64 * 4)  # rank 1 holds one of three heads
    assert swapped.num_blocks == (full - 2 * 4095) // (BLOCK * 2 * 2 * 64 * 4)
    assert plan.kv_bytes == plan.num_blocks * BLOCK * 2 * 3 * 64 * 4


def test_requested_pools_too_large_for_a_device_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--kv-cache-memory 1000000 bytes: \d+ of them are for rank 0 of 2, .* 70000 free"
    ):
        plan_devices(TENSORS, [70_000, 1 << 20], 1_000_000, BLOCK, 4096)
    assert plan_devices(TENSORS, [1 << 20] * 2, 1_000_000, BLOCK, 4096).num_blocks == 40


def test_more_ranks_than_the_device_kind_can_add_up_over_are_refused() -> None:
    options = dataclasses.replace(RanksOptions(cores=((), ()), num_threads=1), device="tpu")

    with pytest.raises(ConfigError, match="ranks cannot run on tpu: it has no process groups"):
        load_ranks(
            Path("/no/model"), dtype="float32", block_size=BLOCK, kv_cache_memory=None, ranks=options,
            on_lost=lambda error: None,
        )  # fmt: skip
