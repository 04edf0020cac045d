"""The pool's plan: never more than the budget, as much as fits, and numbers in every refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory_plan import MemoryPlan, cpu_budget, device_budget, plan_pool
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout

_GIB = 1 << 30


def _tensors(layers: int = 2, heads: int = 3, dim: int = 64) -> list[KvTensor]:
    return [KvTensor(layer, name, heads, dim, "float32") for layer in range(layers) for name in ("k", "v")]


@given(
    budget=st.integers(1 << 24, 1 << 32),
    block_size=st.sampled_from([16, 32, 128]),
    layers=st.integers(1, 40),
    heads=st.integers(1, 8),
)
def test_the_pool_fills_the_budget_and_stays_inside(budget: int, block_size: int, layers: int, heads: int) -> None:
    tensors = _tensors(layers, heads, 16)

    plan = plan_pool(tensors, budget_bytes=budget, block_size=block_size, max_model_len=4096)

    layout = PoolLayout(tensors, num_blocks=plan.num_blocks, block_size=block_size)
    assert layout.total_bytes <= budget
    assert budget - layout.total_bytes < layout.token_bytes * block_size + len(tensors) * 4096


@pytest.mark.parametrize(("spare", "needed"), [(0, "1"), (16, r"1, and graphs 16 more")])
def test_too_small_a_pool_is_refused_with_the_flag_and_the_minimum(spare: int, needed: str) -> None:
    def plan(budget: int) -> MemoryPlan:
        return plan_pool(_tensors(), budget_bytes=budget, block_size=16, max_model_len=4096, spare_blocks=spare)

    words = rf"1000 bytes of KV memory are 0 blocks .* needs {needed}: raise --kv-cache-memory to \d+ or more$"
    with pytest.raises(ConfigError, match=words) as refused:
        plan(1000)

    minimum = int(str(refused.value).split()[-3])
    assert plan(minimum).num_blocks == 1
    with pytest.raises(ConfigError):
        plan(minimum - 1)


def test_the_longest_sequence_is_the_smaller_limit() -> None:
    plan = plan_pool(_tensors(), budget_bytes=_GIB, block_size=16, max_model_len=100)

    assert plan.longest_sequence == 100
    assert plan.describe().endswith("longest sequence 100 tokens (model: 100)")
    assert f"{plan.num_blocks} blocks of 16 tokens" in plan.describe()


def test_a_pool_too_small_for_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"30000 bytes .* 0 blocks of 16 tokens \(49152 bytes each\).*needs 1"):
        plan_pool(_tensors(), budget_bytes=30_000, block_size=16, max_model_len=4096)


@pytest.mark.parametrize(("free", "expected"), [(16 * _GIB, _GIB), (2 * _GIB, _GIB // 2)])
def test_a_cpu_gives_one_gib_or_less_where_memory_is_short(free: int, expected: int) -> None:
    assert cpu_budget(None, free) == expected


def test_requested_bytes_are_used_unchanged() -> None:
    assert cpu_budget(5_000_000, _GIB) == 5_000_000
    assert device_budget(5_000_000, 0.9, 2 * _GIB, _GIB) == 5_000_000


@pytest.mark.parametrize("requested", [0, -1, _GIB + 1])
def test_more_bytes_than_available_are_refused(requested: int) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-memory is {requested} .*{_GIB} free"):
        cpu_budget(requested, _GIB)
    with pytest.raises(ConfigError, match=f"--kv-cache-memory is {requested} .*{_GIB} free"):
        device_budget(requested, 0.9, 2 * _GIB, _GIB)


def test_a_device_gives_its_share_minus_used_memory() -> None:
    assert device_budget(None, 0.5, 10 * _GIB, 8 * _GIB) == 3 * _GIB
    assert device_budget(None, 0.1, 10 * _GIB, 8 * _GIB) == 0


@pytest.mark.parametrize("utilization", [0.0, 1.01])
def test_a_share_outside_zero_to_one_is_refused(utilization: float) -> None:
    with pytest.raises(ConfigError, match=f"--gpu-memory-utilization is {utilization}"):
        device_budget(None, utilization, _GIB, _GIB)
