"""The contract of every transport over pools of device memory, CPU tensors here, and between several such ranks."""

from collections.abc import Iterator

import pytest

from kvtransfer import transport_table
from kvtransfer.device_staging import DeviceStaging
from kvtransfer.process_group import payload
from tests.kvtransfer import rank_rig, test_contract, test_far_rank
from tests.kvtransfer import rig as rigs
from tests.kvtransfer.devices import DevicePool, FakeDriver, FakeHost, offer_cuda_ipc
from tests.kvtransfer.every_transport import EVERY_TRANSPORT
from tests.kvtransfer.rig import Rig, make_rig, until

globals().update({name: test for name, test in vars(test_contract).items() if name.startswith("test_")})
test_ranks_of_devices_hand_over_every_head = test_far_rank.test_every_head_of_every_token_lands_in_its_slot


IN_SHORT = ("cuda_ipc", "tcp")
OTHERS = [
    pytest.param(*one.values, marks=[*one.marks, pytest.mark.long])
    for one in EVERY_TRANSPORT
    if one.values[0] not in (*IN_SHORT, "shm")
]


@pytest.fixture(params=[*IN_SHORT, *OTHERS])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    host = FakeHost()
    makers, names = offer_cuda_ipc(FakeDriver(host))
    monkeypatch.setattr(transport_table, "_MAKERS", makers)
    monkeypatch.setattr(transport_table, "NAMES", names)
    monkeypatch.setattr(rigs, "Pool", DevicePool)
    monkeypatch.setattr(rank_rig, "Pool", DevicePool)
    monkeypatch.setattr(payload, "make_staging", lambda device, num_bytes, on_host: DeviceStaging(num_bytes, device))
    yield str(request.param)
    until(lambda: host.opened == 0)


@pytest.fixture
def rig(transport: str) -> Iterator[Rig]:
    with make_rig(transport) as made:
        yield made
