"""Every transport that a machine without accelerators can run, as parameters of the contract suite."""

import pytest

from kvtransfer.mooncake import MooncakeTransport
from kvtransfer.transport_table import NAMES
from tests.conftest import MISSING
from tests.kvtransfer.rig import TENSORS, Pool
from wire.kv_layout import PoolLayout


def _lacking() -> str | None:
    pool = Pool(PoolLayout(TENSORS, num_blocks=1, block_size=4))
    try:
        return MooncakeTransport(pool).unusable()
    finally:
        pool.close()


MOONCAKE = pytest.mark.skipif(_lacking() is not None, reason=f"{MISSING}: {_lacking()}")
EVERY_TRANSPORT = [
    pytest.param(name, marks=MOONCAKE if name == "mooncake" else ()) for name in NAMES if name != "cuda_ipc"
]
