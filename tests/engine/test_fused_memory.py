"""The workspace that steps of a fused network use."""

import torch

from engine.fused.memory import RowSizes, StepMemory

_SIZES = RowSizes(hidden=40, qkv=120, attended=40, inner=80, logits=50)


def test_memory_grown_by_a_vector_step_works_without_inference_mode() -> None:
    memory = StepMemory(_SIZES, num_threads=1)
    with torch.inference_mode():
        memory.reserve(100, 100)

    for tensor in (memory.x, memory.partial, memory.attended, memory.logits, memory.narrow, memory.scratch):
        tensor[:2] = 1
        assert not tensor.is_inference()


def test_the_address_of_the_given_logits_is_that_of_any_tensor() -> None:
    memory = StepMemory(_SIZES, num_threads=1)
    memory.reserve(8, 8)

    given = memory.logits_of(5, 50)

    assert memory.place_of(given) == (given.data_ptr(), 5, 50, given.stride(0))
    assert memory.place_of(given[2:]) == (given[2:].data_ptr(), 3, 50, given.stride(0))
    assert memory.logits_of(5, 50) is given
    memory.reserve(8, 30)
    assert memory.place_of(given) == (given.data_ptr(), 5, 50, given.stride(0))
