"""Replace parts of a loaded network, and of sampling, by a device's own ops, chosen by its Traits.attention."""

import json
from collections.abc import Callable
from typing import Any

import torch

from devices.interface import Device
from engine.cuda import experts as cuda_experts
from engine.cuda import modules as cuda_modules
from engine.cuda import nucleus as cuda_nucleus
from engine.kernel_check import kernel_check
from engine.modules.replace import STAYED as STAYED
from engine.npu import experts as npu_experts
from engine.npu import modules as npu_modules
from engine.sampling.sampler import Nucleus
from telemetry.logs import EventLogger

_log = EventLogger("engine")

Replacer = Callable[[Any], tuple[str, ...]]
"""Replaces parts of a network that runs our attention; returns one line per change."""

REPLACERS: dict[str, tuple[Replacer, ...]] = {
    "cuda": (cuda_modules.replace_modules, cuda_experts.use_grouped_experts),
    "npu": (npu_modules.replace_modules, npu_experts.use_grouped_experts),
}


NUCLEI: dict[str, Callable[[Device, int], Nucleus | None]] = {"cuda": cuda_nucleus.find_nucleus}


def find_nucleus(device: Device, vocab_size: int) -> Nucleus | None:
    """Return the device's own way to find the tokens of top_p, None for torch's."""
    find = NUCLEI.get(device.traits.attention)
    return None if find is None else find(device, vocab_size)


def replace_modules(network: Any, device: Device) -> tuple[str, ...]:
    """Replace parts of `network`, whose weights are on `device`, by the device's ops; return lines for the log.

    Does nothing if the device has none. May change the network's attention handler.
    """
    replacers = REPLACERS.get(device.traits.attention, ())
    if not replacers:
        return ()
    why = _why_not(network, device) if device.checks_in_child else None
    if why is not None:
        _log.warning("modules_fallback", device=device.name, backend="transformers", error=why)
        return (f"all modules as in transformers, because the device's ops fail their check: {why}",)
    lines = tuple(line for replace in replacers for line in replace(network))
    give_back(device)
    return lines


def _why_not(network: Any, device: Device) -> str | None:
    """Return why a child process could not replace the modules of a layer like those of the network."""
    params = {
        "config": json.loads(network.config.to_json_string(use_diff=False)),
        "dtype": str(network.dtype).rpartition(".")[2],
    }  # fmt: skip
    return kernel_check(device)("modules", params, lambda: None)  # replacing compares each of them in this process


def give_back(device: Device) -> None:
    """Free memory that torch's cache keeps after joining weights or capturing graphs: it would count as in use."""
    empty_cache: Callable[[], None] | None = getattr(
        torch.get_device_module(device.torch_device), "empty_cache", None
    )  # fmt: skip
    if empty_cache is not None:
        empty_cache()
