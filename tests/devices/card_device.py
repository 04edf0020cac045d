"""The card of card.py as a Device: the code that GPUs and NPUs share (devices/torch_device.py) runs over it."""

from dataclasses import replace
from typing import Any

from devices.interface import DeviceBytes, Traits
from devices.torch_device import TorchDevice
from tests.devices import card

TRAITS = Traits(
    kind=card.kind_name(), visible_variable=None, collective="gloo", block_size=16, prefill_chunk_size=64,
    pool_alignment=512, attention="card", is_asynchronous=True,
)  # fmt: skip


class CardKind:
    """Implements DeviceKind."""

    traits = TRAITS

    def sees_card(self) -> bool:
        return True

    def lacking(self) -> str | None:
        return None

    def open(self, index: int = 0) -> "CardDevice":
        assert index == 0, "there is one card"
        return CardDevice()


class CardDevice(TorchDevice):
    """Implements Device: a card of `total_bytes`, in use by all card tensors of the process."""

    def __init__(self, total_bytes: int = 1 << 30, **traits: Any) -> None:
        """`traits` override those of TRAITS, for example attention="cuda"."""
        super().__init__(replace(TRAITS, **traits), 0)
        self._total_bytes = total_bytes

    def memory(self) -> DeviceBytes:
        return DeviceBytes(total=self._total_bytes, free=self._total_bytes - card.used_bytes())
