"""A fake device that is asynchronous: a step's results reach the host only after a wait for its event."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

import engine.device_output
from devices.interface import Device, Traits
from engine.transfers import Download
from tests.devices.fake_device import TRAITS, FakeDevice


@dataclass
class LateDevice(FakeDevice):
    """Implements Device: steps may be launched ahead on it. `activated` counts the calls of `activate`."""

    traits: Traits = field(default_factory=lambda: replace(TRAITS, block_size=16, is_asynchronous=True))
    activated: int = 0

    def activate(self) -> None:
        self.activated += 1


class LateDownload(Download):
    """Copies nothing before it is waited for: an earlier read returns a value that no step computes."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._copies: list[Callable[[], object]] = []
        self._has_ended = False

    def take(self, values: torch.Tensor) -> torch.Tensor:
        assert not self._has_ended, "the event does not cover what is downloaded after it"
        kept = torch.full(values.shape, -(10**6), dtype=values.dtype)
        self._copies.append(lambda: kept.copy_(values))
        return kept

    def end(self) -> None:
        self._has_ended = True
        super().end()

    def wait(self) -> None:
        super().wait()
        with torch.inference_mode():
            for copy in self._copies:
                copy()
        self._copies = []


@contextmanager
def late_downloads() -> Iterator[None]:
    """Delay the results of every step launched in this block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.device_output, "Download", LateDownload)
        yield
