"""Ranks as processes: together they are the model, each holds its heads, and the loss of one ends all."""

import array
import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from engine.loader import load_model
from engine.oracle import generate_greedy
from engine.ranks.load import LoadedRanks, RanksOptions, load_ranks
from engine.ranks.message_kinds import RankMessageKind
from engine.ranks.model import ShardedModel
from engine.ranks.setup import RankSetup
from engine.ranks.team import OnLost, Team
from engine.step import BatchSequence, SampleRow, ScoreRow, StepBatch
from engine.torch_model import TorchModel
from tests.engine.step_runner import GREEDY, generate
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from wire.errors import ConfigError, InstanceLost, PdserveError
from wire.kv_layout import PoolLayout

_POOL_BYTES = 1 << 20
_STEP_S = 2.0
_WAIT_S = 300.0  # a rank imports torch, on a busy machine too


class Lost:
    """Records a lost rank."""

    def __init__(self) -> None:
        self.errors: list[PdserveError] = []
        self._reported = threading.Event()

    def __call__(self, error: PdserveError) -> None:
        self.errors.append(error)
        self._reported.set()

    def wait(self) -> PdserveError:
        """Return the error."""
        assert self._reported.wait(_WAIT_S)
        return self.errors[0]


def _load(path: Path, on_lost: OnLost, *, num_ranks: int = 2, step_s: float = 30.0) -> LoadedRanks:
    options = RanksOptions(cores=((),) * num_ranks, num_threads=1, step_s=step_s)
    return load_ranks(
        path, dtype="float32", block_size=16, kv_cache_memory=_POOL_BYTES, ranks=options, on_lost=on_lost
    )  # fmt: skip


def _prompts(*lengths: int) -> list[list[int]]:
    numbers = random.Random(1)
    return [[numbers.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def _process(model: ShardedModel, rank: int = 1) -> psutil.Process:
    return psutil.Process(model.rank_pids[rank - 1])


def _is_gone(pid: int) -> bool:
    """Wait until a process that is not ours to reap has ended."""
    try:
        psutil.Process(pid).wait(_WAIT_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["in shared memory", pytest.param("over gloo", marks=pytest.mark.long)])
def two(request: pytest.FixtureRequest, llama: Path) -> Iterator[ShardedModel]:
    way, lost = request.param, Lost()
    with pytest.MonkeyPatch.context() as patch:
        if "gloo" in way:
            patch.setenv("PDSERVE_NATIVE", "off")
        else:
            request.getfixturevalue("native_libraries")
        loaded = _load(llama, lost)
    assert f"2 ranks all-reduce {way}" in loaded.notes
    yield loaded.model
    loaded.model.close()
    assert not lost.errors
    assert all(map(_is_gone, loaded.model.rank_pids))


@pytest.fixture(scope="module")
def one(llama: Path) -> Iterator[TorchModel]:
    model = load_model(llama, dtype="float32", block_size=16, kv_cache_memory=_POOL_BYTES, num_threads=1).model
    yield model
    model.close()


def test_two_ranks_generate_what_transformers_does(llama: Path, two: ShardedModel) -> None:
    prompts = _prompts(37, 5, 18)

    assert generate(two, prompts, 12, chunk=16) == generate_greedy(llama, prompts, 12, ignore_eos=True)


def test_its_info_is_that_of_one_rank(two: ShardedModel, one: TorchModel) -> None:
    assert two.info.model == one.info.model
    assert two.info.layout.tensors == one.info.layout.tensors
    assert [(memory.layout.rank.number, memory.layout.heads[0]) for memory in two.memories] == [
        (0, (0, 1)),
        (1, (1, 2)),
    ]
    assert sum(memory.layout.total_bytes for memory in two.memories) <= _POOL_BYTES


def test_each_pool_holds_its_heads_of_the_kv_of_one_rank(two: ShardedModel, one: TorchModel) -> None:
    batch = _one_prompt(_prompts(20)[0], (3, 1))

    two.launch(batch).collect()
    one.launch(batch).collect()

    for tensor in range(len(one.info.layout.tensors)):
        whole = _read(one.memory.buffer, one.memory.layout, tensor, (3, 1), 20)  # [tokens, heads, dim]
        parts = [_read(memory.buffer, memory.layout, tensor, (3, 1), 20) for memory in two.memories]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_a_layer_is_announced_when_all_ranks_have_written_it(two: ShardedModel) -> None:
    prompt, layers = _prompts(16)[0], two.info.layout.num_layers
    batch = _one_prompt(prompt, (7,))
    for memory in two.memories:
        memory.buffer[:] = bytes(len(memory.buffer))
    written: list[tuple[int, list[bool]]] = []

    def layer_done(layer: int) -> None:
        pools = [(memory.buffer, memory.layout) for memory in two.memories]
        tensors = two.info.layout.tensors_of(layer)
        written.append((layer, [bool(_read(*pool, t, (7,), 16).all()) for pool in pools for t in tensors]))

    two.launch(batch, layer_done).collect()

    assert written == [(layer, [True] * 4) for layer in range(layers)]


def test_a_block_is_copied_on_every_rank(two: ShardedModel) -> None:
    prompt = _prompts(16)[0]
    two.launch(_one_prompt(prompt, (9,))).collect()

    two.copy_block(9, 11)
    two.launch(_one_prompt(prompt[:1], (12,))).collect()  # a step, so that the other rank has obeyed

    for memory in two.memories:
        for tensor in range(len(memory.layout.tensors)):
            copies = [_read(memory.buffer, memory.layout, tensor, (block,), 16) for block in (9, 11)]
            assert torch.equal(*copies)
            assert copies[0].any()


def test_blocks_go_to_every_ranks_swap_area_and_back(two: ShardedModel) -> None:
    two.launch(_one_prompt(_prompts(16)[0], (9,))).collect()

    two.save_blocks([9], [0])
    two.launch(_one_prompt(_prompts(16)[0][::-1], (9,))).collect()
    two.load_blocks([0], [10])
    two.copy_block(9, 11)
    two.launch(_one_prompt(_prompts(16)[0], (12,))).collect()

    for memory in two.memories:
        again, other, first = (_read(memory.buffer, memory.layout, 0, (block,), 16) for block in (10, 11, 12))
        assert torch.equal(again, first)
        assert not torch.equal(again, other)


def test_prompts_are_scored_as_by_one_rank(two: ShardedModel, one: TorchModel) -> None:
    prompt = _prompts(12)[0]
    batch = dataclasses.replace(
        _one_prompt(prompt, (2,)), scores=tuple(ScoreRow(row, prompt[row + 1], 2) for row in range(11))
    )  # fmt: skip

    got, expected = (model.launch(batch).collect().scores for model in (two, one))

    assert len(got) == 11
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.rank, mine.top_ids) == (theirs.rank, theirs.top_ids)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_the_pool_of_another_rank_is_sealed_too(two: ShardedModel) -> None:
    for memory in two.memories:
        assert memory.fd is not None
        with pytest.raises(PermissionError):
            os.pwrite(memory.fd, b"x", 0)


def test_a_step_rejected_by_rank_0_costs_no_rank(two: ShardedModel, llama: Path) -> None:
    with pytest.raises(ValueError, match="3 token ids for 2 rows"):
        two.launch(StepBatch((5, 6, 7), (BatchSequence(0, 2, (1,)),), ()))

    prompts = _prompts(6)
    assert generate(two, prompts, 4, chunk=16) == generate_greedy(llama, prompts, 4, ignore_eos=True)


@pytest.mark.long
def test_more_ranks_than_kv_heads_repeat_them(tmp_path: Path) -> None:
    path = make_family("qwen3", tmp_path, num_hidden_layers=2)
    lost = Lost()
    model = _load(path, lost, num_ranks=3).model
    try:
        prompts = _prompts(30, 3)

        assert [memory.layout.heads[0] for memory in model.memories] == [(0, 1), (0, 1), (1, 2)]
        assert generate(model, prompts, 8, chunk=16) == generate_greedy(path, prompts, 8, ignore_eos=True)
    finally:
        model.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    ["phi3", "mixtral", "gemma2", "opt", "gpt_neox", "gpt_oss", "olmo2", "deepseek_v2", "deepseek_v3"],
)
def test_unfused_families_generate_what_transformers_does(tmp_path: Path, kind: str) -> None:
    path, prompts = make_family(kind, tmp_path), _prompts(37, 5)
    model = _load(path, Lost()).model
    try:
        assert generate(model, prompts, 12, chunk=16) == generate_greedy(path, prompts, 12, ignore_eos=True)
    finally:
        model.close()


@pytest.mark.long
@pytest.mark.parametrize("native", ["on", "off"])
def test_a_stopped_rank_ends_the_model_within_the_step_limit(
    llama: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_NATIVE", native)
    lost = Lost()
    model = _load(llama, lost, step_s=_STEP_S).model
    process = _process(model)
    process.send_signal(signal.SIGSTOP)

    with pytest.raises(InstanceLost, match=rf"rank 1 of 2 \(pid {process.pid}\) is stopped by a signal"):
        model.launch(_one_prompt([5, 6, 7], (1,)))

    assert f"pid {process.pid}" in str(lost.wait())
    model.close()
    assert _is_gone(process.pid)


@pytest.mark.long
def test_a_killed_rank_ends_the_model_and_every_later_step(llama: Path) -> None:
    lost = Lost()
    model = _load(llama, lost, num_ranks=3).model
    first, second = _process(model, 1), _process(model, 2)
    second.kill()

    error = lost.wait()

    assert f"rank 2 of 3 (pid {second.pid}) was killed by SIGKILL" in str(error)
    with pytest.raises(InstanceLost, match="was killed by SIGKILL"):
        model.launch(_one_prompt([5, 6, 7], (1,)))
    model.close()
    assert _is_gone(first.pid)
    assert lost.errors == [error]


@pytest.mark.parametrize("native", ["on", pytest.param("off", marks=pytest.mark.long)])
def test_a_rank_killed_during_a_step_fails_that_step(llama: Path, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_NATIVE", native)
    lost = Lost()
    model = _load(llama, lost).model
    process = _process(model)

    def kill(layer: int) -> None:
        process.kill()

    with pytest.raises(InstanceLost, match=rf"pid {process.pid}\) was killed by SIGKILL"):
        model.launch(_one_prompt([5, 6, 7], (1,)), kill)

    model.close()


def test_unshardable_models_are_refused_before_a_rank_starts(tmp_path: Path) -> None:
    path = make_family("gpt2", tmp_path)

    with pytest.raises(ConfigError, match=r"gpt2: only 0 of 4 layers have .* that can be split over 2 ranks"):
        _load(path, Lost())


@pytest.mark.long
def test_a_rank_that_cannot_load_reports_the_reason() -> None:
    team = Team([RankSetup("/no/model", "float32", 1, 2, 16, "auto", None, (), 1, 30.0)], Lost())

    with pytest.raises(ConfigError, match=r"rank 1 of 2 \(pid \d+\): --model /no/model is not a model folder"):
        team.receive(1, RankMessageKind.LOADED, _WAIT_S)
    team.close()
    assert _is_gone(team.pids[0])


@pytest.mark.long
def test_an_orderly_close_kills_no_rank(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow_end = "import atexit, threading\natexit.register(threading.Event().wait)\n"
    (tmp_path / "sitecustomize.py").write_text(slow_end)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        model = _load(llama, Lost()).model

    model.close()

    assert "rank_killed" not in caplog.text


_PARENT = """
import os, signal, sys
from engine.ranks.setup import RankSetup
from engine.ranks.team import Team
setup = RankSetup("/no/model", "float32", 1, 2, 16, "auto", None, (), 1, 30.0)
team = Team([setup], lambda error: None)
print(team._children[0].process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_no_rank_outlives_rank_0() -> None:
    parent = subprocess.run([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, timeout=_WAIT_S, check=False)

    assert parent.returncode == -signal.SIGKILL
    assert _is_gone(int(parent.stdout))


def _one_prompt(prompt: list[int], blocks: tuple[int, ...]) -> StepBatch:
    return StepBatch(
        tuple(prompt), (BatchSequence(0, len(prompt), blocks),), (SampleRow(len(prompt) - 1, GREEDY, 0, 0),)
    )  # fmt: skip


def _read(
    buffer: memoryview, layout: PoolLayout, tensor: int, blocks: tuple[int, ...], num_tokens: int
) -> torch.Tensor:  # fmt: skip
    """Return float32 KV by the layout alone: [num_tokens, heads, head_dim]."""
    values = array.array("f")
    for run in layout.runs(tensor, blocks, 0, num_tokens):
        values.frombytes(buffer[run.offset : run.offset + run.length])
    spec = layout.tensors[tensor]
    return torch.tensor(values).view(num_tokens, spec.heads, spec.head_dim)
