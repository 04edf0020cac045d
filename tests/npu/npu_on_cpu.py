"""An NPU whose tensors are the CPU's, with the traits of the real one, so that all code takes its NPU path.

Its ops are tests/npu/ops.py: call `require_npu_ops()` first, or use the fixture `npu_ops` of tests/npu/conftest.py.
"""

from dataclasses import dataclass, field

from devices.npu import TRAITS
from tests.devices.fake_device import FakeDevice, FakeKind


@dataclass
class NpuOnCpu(FakeDevice):
    """Implements Device as "npu:INDEX"; 128-token blocks, a DevicePool at 2 MiB, attention "npu"."""

    def __init__(self, index: int = 0, total_bytes: int = 1 << 30) -> None:
        super().__init__(index, TRAITS, total_bytes)


@dataclass
class NpuKind(FakeKind):
    """Each device that is opened is another NPU."""

    opened: list[NpuOnCpu] = field(default_factory=list)

    def open(self, index: int = 0) -> NpuOnCpu:
        self.opened.append(NpuOnCpu(len(self.opened)))
        return self.opened[-1]
