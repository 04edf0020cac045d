"""The kind of a machine's devices, from its device nodes."""

from pathlib import Path

import pytest

from ranktable_tools.devices.kinds import absent_note, find_kind, present_devices


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ((), "cpu"),
        (("null", "davinci_manager", "nvidiactl", "nvidia-uvm"), "cpu"),
        (("davinci4", "davinci_manager"), "npu"),
        (("nvidia0", "nvidiactl"), "cuda"),
        (("dxg",), "cuda"),
        (("nvidia0", "davinci0"), "npu"),
    ],
)
def test_the_kind_is_that_of_the_device_nodes(tmp_path: Path, nodes: tuple[str, ...], kind: str) -> None:
    for node in nodes:
        (tmp_path / node).touch()

    assert find_kind(tmp_path) == kind


def test_a_machine_without_dev_computes_on_its_cores(tmp_path: Path) -> None:
    assert find_kind(tmp_path / "none") == "cpu"


def test_devices_are_listed_in_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 0):
        (tmp_path / f"davinci{number}").touch()

    assert present_devices("npu", tmp_path) == ("0", "9", "10")
    assert present_devices("cuda", tmp_path) == ()
    assert present_devices("cpu", tmp_path) == ()


def test_requested_devices_that_are_hidden_are_a_note() -> None:
    note = "this machine has the cuda devices 0, not 4,5: start the instances on the machine that has those"
    assert absent_note("cuda", ["0", "4", "5"], ["0"]) == note
    assert absent_note("cuda", ["0"], ["0", "1"]) is None
    assert absent_note("cpu", ["4"], []) is None
