"""The table of transports: order, defaults, and what is refused in words."""

import pytest

from kvtransfer.transports import DEFAULT_NAMES, make_transports
from tests.kvtransfer.rig import TENSORS, Pool
from wire.errors import ConfigError
from wire.kv_layout import PoolLayout


@pytest.fixture
def pool() -> Pool:
    return Pool(PoolLayout(TENSORS, num_blocks=4, block_size=4))


def test_transports_are_tried_best_first_whatever_the_order_typed(pool: Pool) -> None:
    assert [transport.name for transport in make_transports(("tcp", "shm"), pool)] == ["shm", "tcp"]


def test_none_named_means_the_default_ones(pool: Pool) -> None:
    assert [transport.name for transport in make_transports((), pool)] == list(DEFAULT_NAMES)


def test_an_unknown_name_is_refused_with_the_known_ones(pool: Pool) -> None:
    with pytest.raises(ConfigError, match=r"'carrier_pigeon' is none of shm, "):
        make_transports(("carrier_pigeon",), pool)
