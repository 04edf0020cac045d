"""The tests' own card detects mistakes: each one that it is meant to find raises, or is counted."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.sampling.logprobs import token_logprobs
from tests.devices.card import count_copies, torch_device

CARD = torch_device()


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x + torch.ones(3),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.index_copy_(0, torch.tensor([0]), x[:1]),
        lambda x: torch.where(torch.ones(3, dtype=torch.bool), x, x),
        lambda x: torch.cat([x, torch.ones(1)]),
        lambda x: torch.nn.functional.linear(x, torch.ones(2, 3)),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_mixing_host_and_card_tensors_is_refused(
    mistake: Callable[[torch.Tensor], torch.Tensor], inference: bool
) -> None:
    x = torch.arange(3, device=CARD).float()

    with torch.inference_mode(inference), pytest.raises(RuntimeError, match="a tensor of the host"):
        mistake(x)


def test_a_scalar_tensor_of_the_host_is_accepted_as_on_real_cards() -> None:
    x = torch.ones(3, device=CARD) * torch.tensor(2.0) + 1

    assert x.tolist() == [3.0] * 3


@pytest.mark.parametrize("read", [lambda x: x.numpy(), np.asarray])
def test_numpy_cannot_read_a_card_tensor(read: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        read(torch.ones(3, device=CARD))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[0].item(),
        lambda x: bool((x > 1).any()),
        lambda x: int(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: torch.unique(x),
        lambda x: torch.empty(3).copy_(x),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_each_read_that_waits_is_counted(read: Callable[[torch.Tensor], object], inference: bool) -> None:
    x = torch.ones(3, device=CARD)

    with count_copies() as copies, torch.inference_mode(inference):
        read(x)

    assert copies.reads == {"tests": 1}
    assert not copies.uploads + copies.waited_uploads


def test_copies_from_the_host_are_counted() -> None:
    with count_copies() as copies:
        torch.ones(3).to(CARD)
        torch.tensor([1, 2], device=CARD)
        torch.zeros(3, device=CARD).copy_(torch.ones(3))
        torch.ones(3, device=CARD)
        torch.ones(3).to(CARD, non_blocking=True)

    assert (copies.waited_uploads, copies.uploads) == ({"tests": 3}, {"tests": 1})
    assert not copies.reads


def test_a_copy_is_counted_under_its_function_of_the_product() -> None:
    with count_copies() as copies:
        token_logprobs(torch.randn(2, 5).to(CARD), [1, 2], [0, 0])

    assert set(copies.reads) == {"engine/sampling/logprobs.py:_of_slice"}
    assert copies.waited_uploads == {"tests": 1, "engine/sampling/logprobs.py:_of_slice": 1}


def test_an_asynchronous_copy_holds_garbage_until_it_is_waited_for() -> None:
    x, host = torch.arange(3, device=CARD), torch.empty(3, dtype=torch.int64)
    event, early = torch.get_device_module(CARD).Event(), torch.get_device_module(CARD).Event()
    early.record()

    with count_copies() as copies:
        host.copy_(x, non_blocking=True)
    x.zero_()
    event.record()
    early.synchronize()
    before = host.tolist()
    event.synchronize()

    assert before != [0, 1, 2]
    assert host.tolist() == [0, 1, 2]
    assert (copies.downloads, copies.reads) == ({"tests": 1}, {})


def test_waiting_for_an_unrecorded_event_fails() -> None:
    with pytest.raises(AssertionError, match="never recorded"):
        torch.get_device_module(CARD).Event().synchronize()


def test_views_share_memory_and_in_place_ops_return_their_argument() -> None:
    pool = torch.zeros(16, dtype=torch.uint8, device=CARD)
    floats = pool[4:12].view(torch.float32)

    same = floats.fill_(1.0)

    assert same is floats
    assert pool.tolist() == [*[0] * 4, *[0, 0, 128, 63] * 2, *[0] * 4]
