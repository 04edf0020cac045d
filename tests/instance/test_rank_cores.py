"""A CPU device is a share of the host's cores, and has one rank."""

import pytest

from flags.options import EngineOptions
from instance.config import InstanceConfig
from instance.ranks import deal_cores
from wire.types import Role


@pytest.mark.parametrize(
    ("cores", "num_ranks", "dealt"),
    [
        ((0, 1), 2, ((0,), (1,))),
        ((2, 3, 6, 7), 2, ((2, 3), (6, 7))),
        ((0, 1, 2), 2, ((0,), (1, 2))),
        ((5,), 2, ((5,), (5,))),
        ((0, 1), 3, ((0,), (0,), (1,))),
        ((4, 5), 1, ((4, 5),)),
    ],
)
def test_cores_are_divided_evenly_and_shared_where_few(
    cores: tuple[int, ...], num_ranks: int, dealt: tuple[tuple[int, ...], ...]
) -> None:
    assert deal_cores(cores, num_ranks) == dealt


@pytest.mark.parametrize(
    ("requested", "devices", "ranks"), [(None, ("4", "5"), 2), (2, ("4", "5"), 2), (3, ("0",), 3), (None, ("0",), 1)]
)
def test_there_is_a_rank_for_each_device(requested: int | None, devices: tuple[str, ...], ranks: int) -> None:
    options = EngineOptions(model="m", tensor_parallel_size=requested)

    assert InstanceConfig(options, Role.DECODE, device_ids=devices).num_ranks == ranks
