"""Captured decode steps: the wheel's own graph code passes each replay its lengths, and tokens equal the oracle's."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from devices.npu_graph import NpuGraph, NpuGraphs
from engine.attention.block_tables import DecodeInputs, HostTables, read_tables
from engine.attention.interface import AttentionOptions
from engine.attention.npu import NpuAttention
from engine.loader import load_model
from engine.oracle import Oracle
from tests.engine.attention_case import Case, Shape, make_case
from tests.engine.step_runner import generate
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.npu.graph_machine import make_npu
from tests.npu.npu_on_cpu import NpuOnCpu
from tests.npu.ops import NpuOps


class CapturingNpu(NpuOnCpu):
    """Implements Device, with the graphs of devices/npu_graph.py over the wheel's."""

    def __init__(self, npu: Any) -> None:
        super().__init__()
        self.captures_graphs = True
        self._graphs = NpuGraphs(npu)

    def capture(self, run: Any) -> NpuGraph:
        return self._graphs.capture(run)


@pytest.mark.often("llama", "mistral-sliding")
@pytest.mark.usefixtures("attention_in_float32")
@pytest.mark.parametrize("kind", ["llama", "mistral-sliding", "qwen3"])
def test_tokens_from_graphs_equal_transformers(npu_ops: NpuOps, kind: str, tmp_path: Path) -> None:
    path, numbers = make_tiny_model(kind, tmp_path / kind), random.Random(5)
    prompts = [[numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)] for length in (5, 120, 30)]
    npu, machine = make_npu(npu_ops)

    model = load_model(
        path, dtype="float32", block_size=128, kv_cache_memory=8 << 20, num_threads=1, device=CapturingNpu(npu),
        max_graph_rows=4,
    ).model  # fmt: skip
    got = generate(model, prompts, 20, chunk=200)

    assert got == Oracle(path, "float32").generate_greedy(prompts, 20, ignore_eos=True)
    assert machine.log.count("capture") == machine.log.index("replay") == 3  # sizes 4, 2 and 1, at load
    assert machine.log.count("replay") == 19
    model.close()


_SHAPE = Shape(key_dim=64, value_dim=64, block_size=128, dtype=torch.bfloat16, pool_dtype=torch.bfloat16)
_SINKS = torch.tensor([0.5, 1.0, -2.0, 3.0])


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(0.125),
        AttentionOptions(0.125, sinks=_SINKS),
        AttentionOptions(0.125, sliding_window=20),
        AttentionOptions(0.125, sliding_window=20, sinks=_SINKS),
    ],
    ids=["plain", "sinks", "window", "window-sinks"],
)
def test_a_replay_uses_its_inputs_and_lengths(npu_ops: NpuOps, options: AttentionOptions) -> None:
    npu, machine = make_npu(npu_ops)
    later = make_case([(3, 1), (270, 1), (128, 1)], _SHAPE)
    inputs, host = inputs_of(later)
    decode, pool = NpuAttention().plan_decode(inputs), later.pool_with_past()
    made: list[torch.Tensor] = []

    def run() -> None:
        step = decode.step()
        step.write(pool.keys, pool.values, later._new_rows("keys"), later._new_rows("values"))
        made.append(step.attend(later._new_rows("query"), pool.keys, pool.values, options))

    inputs.kv_lengths.fill_(1)
    decode.prepare(replace(host, kv_lengths=host.kv_lengths * 0 + 1))
    graph = NpuGraphs(npu).capture(run)
    inputs.kv_lengths.copy_(torch.from_numpy(host.kv_lengths))
    graph.replay(decode.prepare(host))

    torch.testing.assert_close(made[-1].float(), later.expected(options), rtol=1e-2, atol=1e-2)
    graph.replay()  # as before
    torch.testing.assert_close(made[-1].float(), later.expected(options), rtol=1e-2, atol=1e-2)
    assert machine.log == ["capture", "replay", "record", "synchronize", "replay", "record"]


def test_a_replay_without_updated_lengths_never_ends(npu_ops: NpuOps) -> None:
    npu, _ = make_npu(npu_ops)
    case = make_case([(270, 1)], _SHAPE)
    inputs, host = inputs_of(case)
    decode, pool = NpuAttention().plan_decode(inputs), case.pool_with_past()
    made: list[torch.Tensor] = []

    def run() -> None:
        step = decode.step()
        step.write(pool.keys, pool.values, case._new_rows("keys"), case._new_rows("values"))
        made.append(step.attend(case._new_rows("query"), pool.keys, pool.values, AttentionOptions(0.125)))

    lengths = decode.prepare(host)
    graph = NpuGraphs(npu).capture(run)

    with pytest.raises(RuntimeError, match="this replay never ends"):
        graph._graph.replay()
    graph.replay({name: [100] for name in lengths})
    with pytest.raises(AssertionError):
        torch.testing.assert_close(made[-1].float(), case.expected(AttentionOptions(0.125)), rtol=1e-2, atol=1e-2)


def test_without_graphs_the_next_capture_gets_a_new_pool(npu_ops: NpuOps) -> None:
    npu, machine = make_npu(npu_ops)
    graphs = NpuGraphs(npu)

    kept = [graphs.capture(lambda: None) for _ in range(2)]
    assert len(machine.pools) == 1
    kept.clear()
    graphs.capture(lambda: None)

    assert len(machine.pools) == 2
    gone = next(iter(machine.pools))
    with pytest.raises(RuntimeError, match="use_count > 0"), npu.graph(npu.NPUGraph(), pool=gone):
        pass


def test_a_capture_without_attention_tasks_cannot_be_updated(npu_ops: NpuOps) -> None:
    npu, _ = make_npu(npu_ops)
    graph = npu.NPUGraph()

    with npu.graph(graph):
        torch.ones(3)

    with pytest.raises(RuntimeError, match="auto_dispatch_capture=True"):
        NpuGraph(npu, graph).replay({"actual_seq_lengths_kv": [3]})


def inputs_of(case: Case) -> tuple[DecodeInputs, HostTables]:
    """Return the fixed inputs of a step of one row per sequence."""
    host = read_tables(case.metadata.packed, 128)
    lengths, tables = torch.from_numpy(host.kv_lengths.copy()), torch.from_numpy(host.tables)
    zero = torch.zeros(len(lengths), dtype=torch.int64)
    return DecodeInputs(128, zero, lengths - 1, case.metadata.slots, lengths, tables), host
