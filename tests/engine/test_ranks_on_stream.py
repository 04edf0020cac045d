"""Ranks whose sums stay on their devices' streams, in graphs too: no host waits within a step, a lost rank ends it."""

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from devices import table
from devices.collectives import COLLECTIVES
from devices.cpu import CpuDevice
from engine import torch_model
from engine.core import EngineCore
from engine.oracle import Oracle
from engine.ranks.load import RanksOptions, load_ranks
from engine.ranks.model import ShardedModel
from engine.ranks.team import OnLost
from engine.step import BatchSequence, PoolingRows, SampleRow, ScoreRow, StepBatch
from tests.devices.late_device import late_downloads
from tests.devices.stream import STREAM, Stream, StreamKind, stream_collective
from tests.devices.stream_rank import CAPTURE_FAULT, COLLECTIVE, FAULT, PROGRAM
from tests.devices.tiny_traffic import core_on, every_sort, ids, plain, run
from tests.engine.step_runner import GREEDY
from tests.engine.tiny_models import make_tiny_model
from wire.errors import InstanceLost, PdserveError

ROOT = Path(__file__).parents[2]
BLOCK = 16
POOL = 30 * BLOCK * (2 * 2 * 2 * 16 * 4) + (8 << 12)  # bytes of 30 blocks: layers, k and v, heads, head_dim, float32
NUM_SUMS = 4  # two a layer
MAX_ROWS, NUM_GRAPHS = 16, 6  # of 16 rows with two widths of tables, and of 8, 4, 2 and 1
LOST_S = 300.0
CaptureFault = tuple[int, int, str]
"""See Stream.capture_fault."""
KILLED, STOPPED = "was killed by SIGKILL", "is stopped by a signal: no sum over the ranks within"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models"))


@contextmanager
def loaded(
    path: Path, collective: str, on_lost: OnLost, *, step_s: float = 30.0, fault: tuple[int, int] | None = None,
    max_rows: int = MAX_ROWS, capture_faults: tuple[CaptureFault | None, CaptureFault | None] = (None, None),
) -> Iterator[ShardedModel]:  # fmt: skip
    """A model of two ranks on the fake device, whose stream is made anew; faults of rank 1, and of captures by rank."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as undo:
        patch.setattr(STREAM, "__dict__", Stream().__dict__)
        patch.setitem(table.KINDS, "fake", StreamKind(collective))
        patch.setitem(COLLECTIVES, collective, stream_collective(collective))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv(COLLECTIVE, collective)
        if fault is not None:
            patch.setenv(FAULT, ",".join(map(str, fault)))
        STREAM.capture_fault, of_rank_1 = capture_faults
        if of_rank_1 is not None:
            patch.setenv(CAPTURE_FAULT, ",".join(map(str, of_rank_1)))
        options = RanksOptions(
            cores=((), ()), num_threads=1, step_s=step_s, device="fake", visible=("4", "7"), program=PROGRAM,
            max_graph_rows=max_rows,
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


def carried_step(tokens: tuple[int, ...] = (0,), carried: tuple[tuple[int, int], ...] = ((0, 0),)) -> StepBatch:
    return StepBatch(tokens, (BatchSequence(3, 1, (1,)),), (SampleRow(0, GREEDY, 0, 1),), carried=carried)


def test_no_host_waits_from_a_launch_to_its_collect(two: ShardedModel) -> None:
    with STREAM.watched() as seen:
        one = two.launch(first())
        other = two.launch(carried_step())  # replayed
    with STREAM.watched() as collecting:
        (token,), (after,) = one.collect().token_ids, other.collect().token_ids

    assert "host waits" not in seen
    assert seen.count("sum") == NUM_SUMS + NUM_SUMS + 1  # the last one is of the tokens that are carried
    assert seen.count("replay") == 1
    assert "sum" not in collecting
    assert two.launch(carried_step((token,), ())).collect().token_ids == [after]


def test_requests_of_every_kind_run_ahead_and_equal_the_cpus(two: ShardedModel, path: Path) -> None:
    core = EngineCore(two, max_num_seqs=16, max_num_batched_tokens=64, prefill_chunk_size=24)
    with late_downloads(), STREAM.watched() as seen:
        for state in every_sort():
            core.add(state)
        outputs = run(core)
    with core_on(CpuDevice(), path, attention_backend="reference") as cpu:
        for state in every_sort():
            cpu.add(state)
        on_cpu = run(cpu)

    assert core.runs_ahead
    assert outputs.tokens == on_cpu.tokens
    assert seen.count("replay") > 10
    assert STREAM.num_captures == NUM_GRAPHS, "no graph is captured for a request"
    core.blocks.check()
    assert core.blocks.num_used == 0


def test_greedy_tokens_equal_transformers_as_blocks_are_swapped(two: ShardedModel, path: Path) -> None:
    lengths = (90, 116, 75, 104)
    core = EngineCore(two, max_num_seqs=16, max_num_batched_tokens=64, prefill_chunk_size=24, swap_bytes=1 << 22)
    with late_downloads(), STREAM.watched() as seen:
        for length in lengths:
            core.add(plain(str(length), length, max_tokens=60))
        outputs = run(core)

    expected = Oracle(path, "float32").generate_greedy([ids(length) for length in lengths], 60, ignore_eos=True)
    assert [outputs.tokens[str(length), 0] for length in lengths] == expected
    assert outputs.swapped_out > 0
    assert seen.count("replay") > 60


def test_a_layer_is_reported_behind_the_sum_that_all_ranks_join(two: ShardedModel) -> None:
    reported: list[tuple[int, list[str], int]] = []
    pool = two.memories[0]
    before = pool.num_marks  # type: ignore[attr-defined]

    def report(layer: int) -> None:
        reported.append((layer, STREAM.log[-2:], pool.num_marks - before))  # type: ignore[attr-defined]

    two.launch(first(), report).collect()

    assert reported == [(0, ["sum", "event"], 1), (1, ["sum", "event"], 2)]


def decoding(num_rows: int) -> StepBatch:
    """A step of sequences of one token each."""
    rows = range(num_rows)
    return StepBatch(
        tuple(5 + row for row in rows), tuple(BatchSequence(0, 1, (row,)) for row in rows),
        tuple(SampleRow(row, GREEDY, 0, 0) for row in rows),
    )  # fmt: skip


def test_a_step_that_no_graph_can_run_is_launched_on_all_ranks(two: ShardedModel) -> None:
    """The other ranks get neither scores nor pooling rows: without notice from rank 0 they would replay such a step."""
    few = decoding(3)  # a graph would pad them to four
    expected = two.launch(few).collect().token_ids

    with STREAM.watched() as seen:
        chosen = two.launch(decoding(MAX_ROWS + 1)).collect().token_ids
        scored = two.launch(replace(few, scores=(ScoreRow(0, 9, 1),))).collect()
        pooled = two.launch(replace(few, pooling_rows=(PoolingRows(0, 1),))).collect()
        reported = two.launch(few, lambda layer: None).collect()

    assert seen.count("replay") == 0
    assert chosen[:3] == scored.token_ids == pooled.token_ids == reported.token_ids == expected


def test_an_error_after_a_replay_ends_its_step_alone(two: ShardedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay issues all sums of its step at once, so no other rank waits for this one."""
    one = decoding(1)
    expected = two.launch(one).collect().token_ids
    with monkeypatch.context() as patch:
        patch.setattr(torch_model, "DeviceStep", fail)
        with pytest.raises(RuntimeError, match="no memory for the tokens"):
            two.launch(one)

    assert two.launch(one).collect().token_ids == expected


def fail(*args: object) -> None:
    raise RuntimeError("no memory for the tokens")


@pytest.mark.long
@pytest.mark.parametrize(
    ("capture_faults", "warning"),
    [
        ((None, (2, 6, "not permitted")), "graphs_off rows=16 width=16 .* rank 1 of 2: .*not permitted"),
        (
            ((5, 0, "out of memory"), (6, 0, "out of memory")),
            "graphs_limited .*first_left_out_rows=2 .*left_out=2 .*graphs=4 .* rank 0 of 2: .*out of memory",
        ),
        (((2, 4, "not permitted"), None), "graphs_off rows=16 width=16 .* rank 0 of 2: .*not permitted"),
        (((5, 8, "out of memory"), None), "graphs_limited .*left_out=1 .*graphs=5 .* rank 0 of 2: .*out of memory"),
    ],
)
def test_a_shape_that_one_rank_cannot_capture_is_dropped_by_all(
    capture_faults: tuple[CaptureFault | None, CaptureFault | None], warning: str, path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A warm-up has four sums, and as many are captured: the faults lie in a capture, at its start, and at its end.

    Those before the first sum lie in the run that each rank makes alone. Two prompts would need the last but one shape,
    that of two rows.
    """
    lost: list[PdserveError] = []
    prompts = [ids(9), ids(20)]
    with loaded(path, "nccl", lost.append, capture_faults=capture_faults) as model:
        core = EngineCore(model, max_num_seqs=16, max_num_batched_tokens=64, prefill_chunk_size=24)
        for prompt in prompts:
            core.add(plain(str(len(prompt)), len(prompt), max_tokens=8))
        with STREAM.watched() as seen:
            outputs = run(core)
        slowest_ranks = model._team.marks.slowest()

    (logged,) = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    assert re.search(warning, logged)
    assert (seen.count("replay") > 0) == ("graphs_limited" in warning)
    expected = Oracle(path, "float32").generate_greedy(prompts, 8, ignore_eos=True)
    assert [outputs.tokens[str(len(prompt)), 0] for prompt in prompts] == expected
    assert slowest_ranks == (), "a rank that left sums out would be blamed for the next delay"
    assert not lost


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_in_a_warm_up_ends_the_start(rank: int, path: Path) -> None:
    """The other rank waits on its device for the next sum, which nothing else would end."""
    fault, lost = (2, 2, "an illegal memory access"), Future[PdserveError]()
    faults = (fault, None) if rank == 0 else (None, fault)

    with (
        pytest.raises(PdserveError, match=rf"rank {rank} of 2 \(pid \d+\).*an illegal memory access"),
        loaded(path, "nccl", lost.set_result, capture_faults=faults),
    ):
        pass

    assert f"rank {rank} of 2" in str(lost.result(LOST_S))


@pytest.mark.long  # test_ranks.py loses one in every run
@pytest.mark.parametrize(
    ("collective", "number", "words", "max_rows"),
    [
        ("nccl", signal.SIGKILL, KILLED, MAX_ROWS),
        ("nccl", signal.SIGKILL, KILLED, 0),
        ("hccl", signal.SIGKILL, KILLED, MAX_ROWS),
        ("nccl", signal.SIGSTOP, STOPPED, MAX_ROWS),
        ("nccl", signal.SIGSTOP, STOPPED, 0),
        ("hccl", signal.SIGSTOP, STOPPED, MAX_ROWS),
    ],
)
def test_a_rank_lost_between_two_sums_ends_the_step(
    collective: str, number: int, words: str, max_rows: int, path: Path
) -> None:
    """With graphs the second step is a replay."""
    warm_ups, lost = NUM_GRAPHS * NUM_SUMS if max_rows else 0, Future[PdserveError]()
    at = 1 + warm_ups + NUM_SUMS + 3
    with loaded(path, collective, lost.set_result, step_s=2.0, fault=(at, number), max_rows=max_rows) as model:
        STREAM.join_s = 1.0
        (pid,) = model.rank_pids
        one = model.launch(first())
        with pytest.raises(InstanceLost, match=rf"rank 1 of 2 \(pid {pid}\) {words}"):  # noqa: PT012 - either raises
            other = model.launch(carried_step())
            one.collect()
            other.collect()

        assert f"pid {pid}" in str(lost.result(LOST_S))
        assert STREAM.aborted == (collective == "nccl")
        assert STREAM.log.count("replay") == bool(max_rows)
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
