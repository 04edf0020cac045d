"""The fake device, which can die: every call to it then fails as on a card, or never returns."""

import threading
from dataclasses import dataclass, field

from tests.devices.fake_device import FakeDevice, FakeEvent

FAULT = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA to see more."


@dataclass
class DyingDevice(FakeDevice):
    """Implements Device. `fails_with`: the error of its events. While `answers` is clear, waits for them block."""

    fails_with: Exception | None = None
    answers: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.answers.set()

    def event(self) -> "DyingEvent":
        if self.fails_with is not None:
            raise self.fails_with
        return DyingEvent(self)


class DyingEvent(FakeEvent):
    """Implements Event."""

    def __init__(self, device: DyingDevice) -> None:
        super().__init__(device)
        self._answers = device.answers

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        return self._answers.is_set()

    def synchronize(self) -> None:
        self._answers.wait()
