"""Ranks whose sums stay on their devices' streams: no host waits within a step, and a lost rank ends it in time."""

import signal
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from devices import table
from devices.collectives import COLLECTIVES
from devices.cpu import CpuDevice
from engine.core import EngineCore
from engine.oracle import Oracle
from engine.ranks.load import RanksOptions, load_ranks
from engine.ranks.model import ShardedModel
from engine.ranks.team import OnLost
from engine.step import BatchSequence, SampleRow, StepBatch
from tests.devices.late_device import late_downloads
from tests.devices.stream import STREAM, Stream, StreamKind, stream_collective
from tests.devices.stream_rank import COLLECTIVE, FAULT, PROGRAM
from tests.devices.tiny_traffic import core_on, every_sort, ids, plain, run
from tests.engine.step_runner import GREEDY
from tests.engine.tiny_models import make_tiny_model
from wire.errors import InstanceLost, PdserveError

ROOT = Path(__file__).parents[2]
BLOCK = 16
POOL = 30 * BLOCK * (2 * 2 * 2 * 16 * 4) + (8 << 12)  # bytes of 30 blocks: layers, k and v, heads, head_dim, float32
NUM_SUMS = 4  # two a layer
LOST_S = 30.0
KILLED, STOPPED = "was killed by SIGKILL", "is stopped by a signal: no sum over the ranks within"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models"))


@contextmanager
def loaded(
    path: Path, collective: str, on_lost: OnLost, *, step_s: float = 30.0, fault: tuple[int, int] | None = None
) -> Iterator[ShardedModel]:
    """A model of two ranks on the fake device, whose stream is made anew."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as undo:
        patch.setattr(STREAM, "__dict__", Stream().__dict__)
        patch.setitem(table.KINDS, "fake", StreamKind(collective))
        patch.setitem(COLLECTIVES, collective, stream_collective(collective))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv(COLLECTIVE, collective)
        if fault is not None:
            patch.setenv(FAULT, ",".join(map(str, fault)))
        options = RanksOptions(
            cores=((), ()), num_threads=1, step_s=step_s, device="fake", visible=("4", "7"), program=PROGRAM
        )  # fmt: skip
        model = load_ranks(
            path, dtype="float32", block_size=BLOCK, kv_cache_memory=POOL, ranks=options, on_lost=on_lost
        ).model  # fmt: skip
        undo.callback(model.close)
        yield model


@pytest.fixture(scope="module", params=["nccl", pytest.param("hccl", marks=pytest.mark.long)])
def two(request: pytest.FixtureRequest, path: Path) -> Iterator[ShardedModel]:
    lost: list[PdserveError] = []
    with loaded(path, request.param, lost.append) as model:
        yield model
    assert not lost


def first(tokens: tuple[int, ...] = (5, 6, 7)) -> StepBatch:
    return StepBatch(tokens, (BatchSequence(0, len(tokens), (1,)),), (SampleRow(len(tokens) - 1, GREEDY, 0, 0),))


def behind(tokens: tuple[int, ...] = (0,), carried: tuple[tuple[int, int], ...] = ((0, 0),)) -> StepBatch:
    return StepBatch(tokens, (BatchSequence(3, 1, (1,)),), (SampleRow(0, GREEDY, 0, 1),), carried=carried)


def test_no_host_waits_from_a_launch_to_its_collect(two: ShardedModel) -> None:
    with STREAM.watched() as seen:
        one = two.launch(first())
        other = two.launch(behind())
    with STREAM.watched() as collecting:
        (token,), (after,) = one.collect().token_ids, other.collect().token_ids

    assert "host waits" not in seen
    assert seen.count("sum") == NUM_SUMS + NUM_SUMS + 1  # the last one is of the tokens that are carried
    assert "sum" not in collecting
    assert two.launch(behind((token,), ())).collect().token_ids == [after]


def test_requests_of_every_kind_run_ahead_and_equal_the_cpus(two: ShardedModel, path: Path) -> None:
    core = EngineCore(two, max_num_seqs=16, max_num_batched_tokens=64, prefill_chunk_size=24)
    with late_downloads():
        for state in every_sort():
            core.add(state)
        outputs = run(core)
    with core_on(CpuDevice(), path, attention_backend="reference") as cpu:
        for state in every_sort():
            cpu.add(state)
        on_cpu = run(cpu)

    assert core.runs_ahead
    assert outputs.tokens == on_cpu.tokens
    core.blocks.check()
    assert core.blocks.num_used == 0


def test_greedy_tokens_equal_transformers_as_blocks_are_swapped(two: ShardedModel, path: Path) -> None:
    lengths = (90, 116, 75, 104)
    core = EngineCore(two, max_num_seqs=16, max_num_batched_tokens=64, prefill_chunk_size=24, swap_bytes=1 << 22)
    with late_downloads():
        for length in lengths:
            core.add(plain(str(length), length, max_tokens=60))
        outputs = run(core)

    expected = Oracle(path, "float32").generate_greedy([ids(length) for length in lengths], 60, ignore_eos=True)
    assert [outputs.tokens[str(length), 0] for length in lengths] == expected
    assert outputs.swapped_out > 0


def test_a_layer_is_reported_behind_the_sum_that_all_ranks_join(two: ShardedModel) -> None:
    reported: list[tuple[int, list[str], int]] = []
    pool = two.memories[0]
    before = pool.num_marks  # type: ignore[attr-defined]

    def report(layer: int) -> None:
        reported.append((layer, STREAM.log[-2:], pool.num_marks - before))  # type: ignore[attr-defined]

    two.launch(first(), report).collect()

    assert reported == [(0, ["sum", "event"], 1), (1, ["sum", "event"], 2)]


@pytest.mark.parametrize(
    ("collective", "number", "words"),
    [
        ("nccl", signal.SIGKILL, KILLED),
        pytest.param("hccl", signal.SIGKILL, KILLED, marks=pytest.mark.long),
        pytest.param("nccl", signal.SIGSTOP, STOPPED, marks=pytest.mark.long),
        pytest.param("hccl", signal.SIGSTOP, STOPPED, marks=pytest.mark.long),
    ],
)
def test_a_rank_lost_between_two_sums_ends_the_step(collective: str, number: int, words: str, path: Path) -> None:
    at, lost = 1 + NUM_SUMS + 3, Future[PdserveError]()
    with loaded(path, collective, lost.set_result, step_s=2.0, fault=(at, number)) as model:
        STREAM.join_s = 1.0
        (pid,) = model.rank_pids
        one = model.launch(first())
        with pytest.raises(InstanceLost, match=rf"rank 1 of 2 \(pid {pid}\) {words}"):  # noqa: PT012 - either raises
            other = model.launch(behind())
            one.collect()
            other.collect()

        assert f"pid {pid}" in str(lost.result(LOST_S))
        assert STREAM.aborted == (collective == "nccl")
        with pytest.raises(InstanceLost):
            model.launch(first()).collect()
    assert not psutil.pid_exists(pid)


@pytest.mark.long
def test_a_devices_error_shown_by_the_event_names_the_rank(path: Path) -> None:
    lost = Future[PdserveError]()
    with loaded(path, "nccl", lost.set_result) as model:
        step = model.launch(first())
        STREAM.error = "CUDA error: an illegal memory access was encountered"
        with pytest.raises(InstanceLost, match=r"rank 0 of 2 \(pid \d+\) failed within a step: CUDA error: an illegal"):
            step.collect()

        assert "CUDA error" in str(lost.result(LOST_S))
        assert STREAM.aborted
