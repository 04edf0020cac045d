"""Check the device's own ops for norms, gated MLPs, rotations and experts against the originals in random networks."""

import functools
from collections.abc import Iterator

import torch

from devices.interface import Device
from engine.device_modules import REPLACERS, STAYED, replace_modules
from pdserve.selftest.check import NotHere, SelftestCheck, Wrong


def part_checks(device: Device) -> Iterator[SelftestCheck]:
    """Yield the checks; each raises NotHere if the device has no ops of its own."""
    yield SelftestCheck("network", "norms, gated MLPs and rotations", functools.partial(_replace, device))
    yield SelftestCheck("experts", "in groups", functools.partial(_group, device))


def _replace(device: Device) -> str:
    if device.traits.attention not in REPLACERS:
        raise NotHere(f"{device.traits.kind} has no ops of its own: it uses those of transformers")
    lines = replace_modules(_network(device), device)
    if any(STAYED in line for line in lines):
        raise Wrong("; ".join(lines))
    return "; ".join(lines)


def _group(device: Device) -> str:
    if device.traits.attention not in REPLACERS:
        raise NotHere(f"{device.traits.kind} has no ops of its own: it uses those of transformers")
    lines = [line for line in replace_modules(_network(device, "mixtral"), device) if "experts" in line]
    if not any(line.startswith("by ") for line in lines):
        raise Wrong("; ".join(lines) or "no experts were replaced")
    return "; ".join(lines)


def _network(device: Device, family: str = "llama") -> torch.nn.Module:
    """Return a random bfloat16 network of two layers, with head size 64 and pdserve's attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.attention.registered import NAME, register

    register()
    config = AutoConfig.for_model(
        family, vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
    )  # fmt: skip
    network: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
    return network.to(device.torch_device).eval()
