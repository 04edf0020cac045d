"""Pools on their own devices: a refusal names the rank, its device's bytes and the sum over all ranks."""

import re

import pytest

from engine.ranks.pools import plan_devices
from wire.errors import ConfigError
from wire.kv_layout import KvTensor

BLOCK, LENGTH = 16, 4096
TENSORS = (KvTensor(0, "k", 3, 64, "float32"), KvTensor(0, "v", 3, 64, "float32"))
ENOUGH = 1 << 20
LEFT = "device card, 512 MiB left for steps"


def refusal(free: list[int], devices: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        plan_devices(TENSORS, free, None, BLOCK, LENGTH, devices)
    return str(error.value)


def test_a_rank_without_room_on_its_device_is_named_with_bytes() -> None:
    output = refusal([ENOUGH, 1000], ["card 0", LEFT])

    assert output.startswith(f"rank 1 of 2 ({LEFT}) has 1000 bytes for its KV pool, but needs ")
    assert "(a sequence takes 1 block of 16 tokens)" in output
    assert "raise --gpu-memory-utilization, or lower --max-num-seqs" in output


@pytest.mark.parametrize("requested", [None, ENOUGH])
def test_spare_blocks_of_graphs_are_taken_from_the_pools(requested: int | None) -> None:
    plain = plan_devices(TENSORS, [ENOUGH] * 2, requested, BLOCK, LENGTH)
    graphs = plan_devices(TENSORS, [ENOUGH] * 2, requested, BLOCK, LENGTH, spare_blocks=3)

    assert graphs.num_blocks == plain.num_blocks - 3


def test_room_for_a_sequence_but_not_for_spare_blocks_is_refused() -> None:
    least = 1 * BLOCK * 2 * 2 * 64 * 4 + 2 * 4095

    assert plan_devices(TENSORS, [least, ENOUGH], None, BLOCK, LENGTH).num_blocks == 1
    with pytest.raises(ConfigError, match="takes 1 block of 16 tokens, and graphs 3 more"):
        plan_devices(TENSORS, [least, ENOUGH], None, BLOCK, LENGTH, spare_blocks=3)


def test_the_total_named_in_a_refusal_is_a_size_that_works() -> None:
    output = refusal([1000, 2000], ["card 0", "card 1"])
    minimum = int(re.findall(r"--kv-cache-memory, for all 2 ranks together, to (\d+) or more", output)[0])

    assert "rank 0 of 2 (card 0) has 1000 bytes" in output, "the first that lacks room"
    assert plan_devices(TENSORS, [ENOUGH] * 2, minimum, BLOCK, LENGTH).num_blocks == 1
    with pytest.raises(ConfigError):
        plan_devices(TENSORS, [ENOUGH] * 2, minimum - 1, BLOCK, LENGTH)
