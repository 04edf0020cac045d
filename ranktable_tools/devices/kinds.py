"""Detect this machine's kind of device from its device nodes, without running a tool."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

DeviceKind = Literal["cpu", "cuda", "npu"]
KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)
_NODE = {"npu": re.compile(r"davinci([0-9]+)"), "cuda": re.compile(r"nvidia([0-9]+)")}


def kind_named(name: str) -> DeviceKind:
    """Return the kind called `name`; `cpu` for any other name: a device without a card is a share of the cores."""
    return next((kind for kind in KINDS if kind == name), "cpu")


def may_share(kind: DeviceKind) -> bool:
    """Return whether two instances may share a device: an NPU can only be in one instance."""
    return kind != "npu"


def find_kind(dev: Path = Path("/dev")) -> DeviceKind:
    """Return `npu` if there is a davinci node, `cuda` if there is a GPU, else `cpu`."""
    if present_devices("npu", dev):
        return "npu"
    # Under WSL a GPU's node is dxg.
    return "cuda" if present_devices("cuda", dev) or (dev / "dxg").exists() else "cpu"


def kind_of_vllm(*, is_ascend: bool) -> DeviceKind:
    """Return the kind that vLLM uses here: `npu` where it is vllm-ascend, else `cuda` or `cpu`."""
    if is_ascend:
        return "npu"
    return "cuda" if find_kind() == "cuda" else "cpu"


def present_devices(kind: DeviceKind, dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the device ids that have a node, in order; none for `cpu`, whose devices are shares of the cores."""
    pattern = _NODE.get(kind)
    if pattern is None or not dev.is_dir():
        return ()
    found = [pattern.fullmatch(entry.name) for entry in dev.iterdir()]
    return tuple(sorted((match[1] for match in found if match), key=int))


def absent_note(kind: DeviceKind, device_ids: Sequence[str], present: Sequence[str]) -> str | None:
    """Return a note if requested devices are not visible on this machine."""
    absent = [device_id for device_id in device_ids if device_id not in present]
    if not present or not absent:
        return None
    return (
        f"this machine has the {kind} devices {','.join(present)}, not {','.join(absent)}: "
        "start the instances on the machine that has those"
    )
