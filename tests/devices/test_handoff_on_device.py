"""KV moves from one device's pool to another's by this process's mover; the answer equals transformers'."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from devices.table import KINDS
from engine.core import EngineCore
from engine.interface import Chunk, Prefilled
from engine.oracle import Oracle, generate_greedy
from kvtransfer.device_memory import region_of
from kvtransfer.mover import process_mover
from native.memory import RegionRuns, Runs, StopFlag
from tests.devices.card_device import TRAITS, CardKind
from tests.devices.every_device import open_device
from tests.devices.tiny_traffic import Outputs, core_on, ids, plain, run
from tests.engine.tiny_models import make_tiny_model
from tests.instance.device_pair import NUM_TOKENS as PAIR_TOKENS
from tests.instance.device_pair import PROMPTS, config, serve_pair
from wire.types import Role

ENDS = ("cpu", "fake", "card", "npu", "cuda")
PAIRS = [
    pytest.param(*pair, marks=[pytest.mark.long] * set(pair).isdisjoint({"card", "cuda"}), id="-to-".join(pair))
    for pair in product(ENDS, ENDS)
    if pair != ("cpu", "cpu") and set(pair) != {"npu", "cuda"}
]
LENGTH, NUM_TOKENS = 75, 12
KIND = TRAITS.kind


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[int]:
    return Oracle(path, "float32").generate_greedy([ids(LENGTH)], NUM_TOKENS, ignore_eos=True)[0]


def move(source: EngineCore, chunks: Sequence[Chunk], target: EngineCore) -> tuple[int, ...]:
    """Move the KV of these chunks, all layers, into blocks of the target; return the blocks."""
    blocks = target.blocks.allocate(target.info.layout.num_blocks_for(LENGTH))
    for chunk in chunks:
        for tensor in range(len(target.info.layout.tensors)):
            here, there = _place(source, tensor, chunk.block_ids, chunk), _place(target, tensor, blocks, chunk)
            assert process_mover().copy_and_digest(here, there, StopFlag()) == process_mover().digest(there)
    return tuple(blocks)


def _place(core: EngineCore, tensor: int, block_ids: Sequence[int], chunk: Chunk) -> RegionRuns:
    layout = core.info.layout
    runs = Runs.of_slots(layout.slots(block_ids, chunk.start, chunk.end), layout.tensors[tensor].token_bytes)
    return RegionRuns(region_of(core.memories[0]), layout.offsets[tensor], runs)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_prompt_continues_on_the_device_that_has_its_kv(
    source: str, target: str, path: Path, expected: list[int]
) -> None:
    a, b = open_device(source), open_device(target)
    with core_on(a, path, block_size=16) as p, core_on(b, path, block_size=128) as d:
        chunks: list[Chunk] = []
        p.add(plain("x", LENGTH, NUM_TOKENS), hold=True)
        outputs, prefilled = Outputs(), list[Prefilled]()
        while not prefilled:
            result = p.step(lambda layer, now: chunks.extend(now) if layer == p.info.layout.num_layers - 1 else None)
            outputs.take(result)
            prefilled += result.prefilled
        d.admit(prefilled[0].state, move(p, chunks, d))
        p.release("x")
        rest = run(d)

    assert [(chunk.start, chunk.end) for chunk in chunks] == [(0, 24), (24, 48), (48, 72), (72, 75)]
    assert outputs.tokens["x", 0] + rest.tokens["x", 0] == expected


@pytest.mark.parametrize(("prefill", "decode"), [
    pytest.param("cpu", KIND, marks=pytest.mark.long), pytest.param(KIND, "cpu", marks=pytest.mark.long), (KIND, KIND),
])  # fmt: skip
def test_two_instances_on_a_card_serve_a_prompt_by_hand_off(
    prefill: str, decode: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, KIND, CardKind())

    outputs, transports = serve_pair(
        config(path, Role.PREFILL, prefill, 16, "tcp", port=4), config(path, Role.DECODE, decode, 32, "tcp", port=6)
    )

    assert outputs == generate_greedy(path, PROMPTS, PAIR_TOKENS, dtype="float32", ignore_eos=True)
    assert transports == {"tcp"}
