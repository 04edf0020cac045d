"""Which card each rank gets: preset, all that are visible, or found by physical id."""

from pathlib import Path

import pytest

from pdserve.device_map import DeviceMap, map_devices
from ranktable_tools.devices.kinds import DeviceKind
from wire.errors import ConfigError

NPU, CUDA = "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
MAP_HEAD = "\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name\n"
GPUS = "--query-gpu=index,uuid,name,driver_version,memory.used,memory.total --format=csv,noheader,nounits"


def _stub(folder: Path, name: str, arguments: str, answer: str) -> dict[str, str]:
    """Write an executable that answers one command line into `folder`; return an environment whose PATH has only it."""
    folder.mkdir(exist_ok=True)
    (folder / "answer").write_text(answer)
    tool = folder / name
    tool.write_text(f'#!/bin/sh\n[ "$*" = "{arguments}" ] || exit 13\nwhile read -r line; do echo "$line"; done < '
                    f"{folder}/answer\n")  # fmt: skip
    tool.chmod(0o755)
    return {"PATH": str(folder)}


def npus(tmp_path: Path, *ids: int) -> dict[str, str]:
    rows = (
        f"\t{i:<31}0                              {i:<31}Ascend 910B4\n\t{i:<31}1{' ' * 30}-{' ' * 30}Mcu\n"
        for i in ids
    )
    return _stub(tmp_path / "bin", "npu-smi", "info -m", MAP_HEAD + "".join(rows))


def gpus(tmp_path: Path, *ids: int) -> dict[str, str]:
    rows = (f"{i}, GPU-{i}f, NVIDIA H200, 570.1, 1, 143771\n" for i in ids)
    return _stub(tmp_path / "bin", "nvidia-smi", GPUS, "".join(rows))


def device_map(kind: DeviceKind, ids: str, environ: dict[str, str], dev: Path) -> DeviceMap:
    found = map_devices(kind, ids.split(","), environ, dev=dev)
    assert found is not None
    return found


def test_cpus_have_no_device_map(tmp_path: Path) -> None:
    assert map_devices("cpu", ["4", "5"], {}, dev=tmp_path) is None


def test_a_container_with_only_the_entrys_cards_sets_no_variable(tmp_path: Path) -> None:
    npu = device_map("npu", "4,5", npus(tmp_path, 0, 1), tmp_path)
    cuda = device_map("cuda", "4,5", gpus(tmp_path, 0, 1), tmp_path)

    assert (npu.value, cuda.value) == (None, None)
    assert npu.line == (
        f"devices: rank 0 = device 4 on card 0, rank 1 = device 5 on card 1 (every visible card; {NPU} stays unset)"
    )
    assert f"{CUDA} stays unset" in cuda.line


def test_the_entrys_cards_in_another_order_are_listed_in_its_order(tmp_path: Path) -> None:
    npu = device_map("npu", "5,4", npus(tmp_path, 4, 5), tmp_path)
    cuda = device_map("cuda", "1,0", gpus(tmp_path, 0, 1), tmp_path)
    in_order = device_map("npu", "4,5", npus(tmp_path, 4, 5), tmp_path)

    assert (npu.value, cuda.value, in_order.value) == ("1,0", "GPU-1f,GPU-0f", None)
    assert npu.line == f"devices: rank 0 = device 5 on 1, rank 1 = device 4 on 0 ({NPU}=1,0)"


def test_different_cards_are_refused_by_the_missing_id(tmp_path: Path) -> None:
    words = rf"device 5 of the table is not among the npu cards visible here \(4,6\): .* set {NPU}"
    with pytest.raises(ConfigError, match=words):
        map_devices("npu", ["4", "5"], npus(tmp_path, 4, 6), dev=tmp_path)


def test_as_many_cards_counted_from_zero_are_a_containers(tmp_path: Path) -> None:
    assert device_map("npu", "1,2", npus(tmp_path, 0, 1), tmp_path).value is None
    assert device_map("cuda", "1", gpus(tmp_path, 0), tmp_path).value is None


def test_without_nvidia_smi_the_card_order_is_not_guessed(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).touch()

    assert device_map("cuda", "0,1", {"PATH": "/nowhere"}, tmp_path).value is None
    with pytest.raises(ConfigError, match=rf"nvidia-smi does not identify the cards 0,1: set {CUDA}"):
        map_devices("cuda", ["1", "0"], {"PATH": "/nowhere"}, dev=tmp_path)


def test_with_more_npus_visible_physical_ids_are_mapped(tmp_path: Path) -> None:
    host = device_map("npu", "6,4", npus(tmp_path, *range(8)), tmp_path)
    some = device_map("npu", "6,7", npus(tmp_path, 7, 4, 5, 6), tmp_path)

    assert (host.variable, host.value) == (NPU, "6,4")
    assert some.value == "2,3"
    assert some.line == f"devices: rank 0 = device 6 on 2, rank 1 = device 7 on 3 ({NPU}=2,3)"


def test_with_more_gpus_visible_cards_are_named_by_uuid(tmp_path: Path) -> None:
    found = device_map("cuda", "3,1", gpus(tmp_path, 0, 1, 2, 3), tmp_path)

    assert (found.variable, found.value) == (CUDA, "GPU-3f,GPU-1f")


def test_without_npu_smi_the_device_nodes_are_counted(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci2", "davinci3", "davinci_manager"):
        (tmp_path / name).touch()

    assert device_map("npu", "3", {"PATH": "/nowhere"}, tmp_path).value == "2"


def test_without_nvidia_smi_cards_are_counted_and_never_guessed(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()

    assert device_map("cuda", "4,5", {"PATH": "/nowhere"}, tmp_path).value is None
    with pytest.raises(ConfigError, match=rf"nvidia-smi does not identify the cards 0,1: set {CUDA}"):
        map_devices("cuda", ["1"], {"PATH": "/nowhere"}, dev=tmp_path)


@pytest.mark.parametrize("ids", ["6,7", "5,6"])
def test_without_nvidia_smi_as_many_other_gpus_are_the_entrys(ids: str, tmp_path: Path) -> None:
    for name in ("nvidia4", "nvidia5"):
        (tmp_path / name).touch()

    assert device_map("cuda", ids, {"PATH": "/nowhere"}, tmp_path).value is None


def test_a_preset_value_is_used(tmp_path: Path) -> None:
    environ = {**npus(tmp_path, 0, 1, 2, 3), NPU: "3, 2"}

    found = device_map("npu", "4,5", environ, tmp_path)

    assert found.value is None
    assert found.line == f"devices: rank 0 = device 4 on 3, rank 1 = device 5 on 2 ({NPU}=3, 2, already set)"


@pytest.mark.parametrize("preset", ["", "3"])
def test_a_preset_value_that_is_too_short_is_refused_with_both(tmp_path: Path, preset: str) -> None:
    with pytest.raises(ConfigError, match=rf"{CUDA}='{preset}' lists {len(preset)} cards?, .* has 2 \(4,5\)"):
        map_devices("cuda", ["4", "5"], {CUDA: preset}, dev=tmp_path)


def test_too_few_cards_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 npu card is visible here \(4\), but the table's entry has 2 \(4,5\)"):
        map_devices("npu", ["4", "5"], npus(tmp_path, 4), dev=tmp_path)
    with pytest.raises(ConfigError, match=r"0 cuda cards are visible here \(none\)"):
        map_devices("cuda", ["4"], {"PATH": "/nowhere"}, dev=tmp_path)


def test_a_device_that_is_not_visible_is_refused_by_its_id(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"device 6 of the table is not among the npu .*\(0,1,2,3\): .* set {NPU}"):
        map_devices("npu", ["6"], npus(tmp_path, 0, 1, 2, 3), dev=tmp_path)
