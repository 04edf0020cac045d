"""--device: which kind is selected, and the message when none can be."""

import pytest

from devices.interface import DeviceKind
from devices.table import AUTO_ORDER, KINDS, choose, find_kind, traits_of
from tests.devices.fake_device import FakeKind
from wire.errors import ConfigError


class Kind(FakeKind):
    """A kind whose card is visible or not."""

    def __init__(self, *, shown: bool, why: str | None = None) -> None:
        super().__init__(why=why)
        self._shown = shown

    def sees_card(self) -> bool:
        return self._shown


def kinds(**given: Kind) -> dict[str, DeviceKind]:
    absent = Kind(shown=False, why="is not here")
    return {name: given.get(name, absent if name != "cpu" else Kind(shown=True)) for name in AUTO_ORDER}


@pytest.mark.parametrize(
    ("given", "taken", "message"),
    [
        ({}, "cpu", "no npu card is visible here; no cuda card is visible here"),
        ({"cuda": Kind(shown=True)}, "cuda", "no npu card"),
        ({"npu": Kind(shown=True), "cuda": Kind(shown=True)}, "npu", "a card is visible here"),
        ({"npu": Kind(shown=True, why="CANN is missing")}, "cpu", "npu cannot be used: CANN is missing"),
    ],
)
def test_auto_takes_the_first_working_kind_with_a_reason(given: dict[str, Kind], taken: str, message: str) -> None:
    known = kinds(**given)

    choice = choose("auto", known)

    assert choice.kind is known[taken]
    assert choice.reason.startswith(f"device {taken}: ")
    assert message in choice.reason


def test_a_requested_kind_is_never_replaced() -> None:
    with pytest.raises(ConfigError, match=r"--device npu: CANN is missing"):
        choose("npu", kinds(npu=Kind(shown=True, why="CANN is missing")))
    with pytest.raises(ConfigError, match="'tpu' is not one of auto, cpu, cuda, npu"):
        find_kind("tpu")


@pytest.mark.parametrize("name", list(KINDS))
def test_an_unusable_kind_gives_its_reason_and_opens_nothing(name: str) -> None:
    kind = KINDS[name]
    lacking = kind.lacking()
    if lacking is None:
        assert kind.open().name.partition(":")[0] == name
    else:
        with pytest.raises(ConfigError, match=f"--device {name}: "):
            kind.open()


def test_the_defaults_that_follow_the_device() -> None:
    sizes = {name: (traits_of(f"{name}:1").block_size, traits_of(name).prefill_chunk_size) for name in KINDS}

    assert sizes == {"cpu": (16, 512), "cuda": (16, 2048), "npu": (128, 2048)}
