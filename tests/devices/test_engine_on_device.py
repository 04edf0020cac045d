"""The whole engine on every device: requests of every kind get the same outputs as on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from devices.cpu import CpuDevice
from devices.interface import Device
from engine.oracle import Oracle
from tests.devices.tiny_traffic import PLENTY, Outputs, core_on, every_sort, ids, plain, run
from tests.engine.tiny_models import make_tiny_model
from wire.types import TokenLogprobs

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def outputs_on_cpu(path: Path) -> Iterator[Outputs]:
    with core_on(CpuDevice(), path, attention_backend="reference") as core:
        for state in every_sort():
            core.add(state)
        yield run(core)


def check_same(mine: list[TokenLogprobs], theirs: list[TokenLogprobs]) -> None:
    assert len(mine) == len(theirs) > 0
    for one, other in zip(mine, theirs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert abs(one.rank - other.rank) <= 1
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=TOLERANCE)


@pytest.mark.often("npu")
def test_requests_of_every_kind_are_answered_as_on_the_cpu(
    any_device: Device, path: Path, outputs_on_cpu: Outputs
) -> None:
    with core_on(any_device, path, block_size=any_device.traits.block_size) as core:
        for state in every_sort():
            core.add(state)
        outputs = run(core)

    assert outputs.tokens == outputs_on_cpu.tokens
    described = {("likely", 0), ("scored", 0), ("searched", 0), ("searched", 1)}
    assert outputs.logprobs.keys() == outputs_on_cpu.logprobs.keys() == described
    for key, likely in outputs.logprobs.items():
        check_same(likely, outputs_on_cpu.logprobs[key])
    check_same(outputs.prompts["scored"], outputs_on_cpu.prompts["scored"])
    assert outputs.vectors.keys() == {"last", "mean", "cls"}
    for name, vector in outputs.vectors.items():
        assert vector == pytest.approx(outputs_on_cpu.vectors[name], abs=TOLERANCE)


@pytest.mark.often("npu-swapped-out")
@pytest.mark.parametrize("swap_bytes", [0, PLENTY], ids=["recomputed", "swapped-out"])
def test_a_full_pool_changes_no_token(device: Device, swap_bytes: int, path: Path) -> None:
    lengths = (3, 16, 9, 14)
    room = 16 * (2 * 2 * 16 * 4) * 2  # bytes of a block of 16 tokens
    with core_on(device, path, kv_bytes=6 * room + (4 << 12), swap_bytes=swap_bytes) as core:
        for length in lengths:
            core.add(plain(str(length), length, max_tokens=26))
        outputs = run(core)

        assert core.load().preemptions > 0
    assert (outputs.swapped_out > 0) == (swap_bytes > 0)
    expected = Oracle(path, "float32").generate_greedy([ids(length) for length in lengths], 26, ignore_eos=True)
    assert [outputs.tokens[str(length), 0] for length in lengths] == expected


@pytest.mark.often("npu", "fake")
def test_a_prompt_uses_the_prefix_cache_on_the_device(device: Device, path: Path) -> None:
    with core_on(device, path, block_size=device.traits.block_size) as core:
        core.add(plain("first", 200))
        first = run(core)
        core.add(plain("again", 200))
        steps = 0
        again = Outputs()
        while core.has_work():
            result = core.step()
            steps += result.num_tokens
            again.take(result)

    assert again.tokens["again", 0] == first.tokens["first", 0]
    assert steps < 200
