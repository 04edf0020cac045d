"""The child process that checks a device's kernels (engine/kernel_check.py): `python -m engine.kernel_child`.

stdin   {"device": "cuda:0", "check": "attention", "params": {...}}
stdout  {"why": null}, as the last line; or a reason
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from devices.interface import Device
from devices.out_of_memory import is_out_of_memory
from devices.table import AUTO, open_device
from engine.kernel_check import NOT_HERE
from engine.torch_start import name_backends
from processes.child_limits import signal_at_parent_end

_VOCAB = 1024


def attention(
    device: Device, *, place: int, kinds: Sequence[dict[str, Any]], block_size: int, dtype: str
) -> str | None:  # fmt: skip
    """Check the device's attention backend (`place` 0), or its `place`-th alternative, on these kinds of layer."""
    import torch

    from engine.attention.backend_choice import why_not, with_alternatives
    from engine.attention.backends import make_backend
    from engine.attention.probe import LayerKind

    candidate = with_alternatives(make_backend(AUTO, device))[place]
    why = why_not(candidate, [LayerKind(**kind) for kind in kinds], device, block_size, getattr(torch, dtype))
    failed: str | None = getattr(candidate, "failed", None)  # the backend computed with other kernels instead
    return why or failed


class Unfit(Exception):
    """The check cannot run in a child; that says nothing about the kernels."""


def modules(device: Device, *, config: dict[str, Any], dtype: str) -> None:
    """Make one layer with random weights and replace its modules by the device's ops, each compared with its module.

    Parts that differ are left out again in the serving process, too; what counts here is that the device survives.
    """
    from engine.device_modules import REPLACERS

    try:
        network = _one_layer(device, config, dtype)
    except Exception as error:
        raise Unfit(_one_line(error)) from error
    for replace in REPLACERS[device.traits.attention]:
        replace(network)


def _one_layer(device: Device, values: dict[str, Any], dtype: str) -> Any:
    """Return a network of one layer with random weights, in the model's shapes except for its vocabulary."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.attention.registered import NAME, register

    register()
    num_layers, ours = values["num_hidden_layers"], {}
    for name, value in values.items():
        is_by_layer = isinstance(value, list) and len(value) == num_layers
        ours[name] = value[:1] if is_by_layer else value
    ours |= {"num_hidden_layers": 1, "vocab_size": _VOCAB, "pad_token_id": None}
    for name in ("quantization_config", "architectures", "auto_map"):
        ours.pop(name, None)
    with torch.device(device.torch_device):
        config = AutoConfig.for_model(**ours)
        made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=NAME)
    return made.eval()


def nucleus(device: Device, *, vocab_size: int) -> str | None:
    """Check the tokens of top_p by FlashInfer."""
    from engine.cuda.nucleus import check_nucleus

    return check_nucleus(device, vocab_size)


CHECKS: dict[str, Callable[..., str | None]] = {"attention": attention, "modules": modules, "nucleus": nucleus}


def main() -> int:
    """Run the check of stdin; return the exit status."""
    signal_at_parent_end(signal.SIGKILL)
    name_backends()
    request = json.load(sys.stdin)
    try:
        device = open_device(request["device"])
        device.activate()
        device.synchronize()
    except Exception as error:  # noqa: BLE001 - from a driver, such as one that allows one process at a time
        return _not_here(_one_line(error))
    try:
        why = CHECKS[request["check"]](device, **request["params"])
        device.synchronize()
    except Unfit as error:
        return _not_here(str(error))
    except Exception as error:  # noqa: BLE001 - a library may raise anything
        why = _one_line(error)
    if why is not None and is_out_of_memory(RuntimeError(why)):  # the weights left too little: not the kernels' fault
        return _not_here(why)
    sys.stdout.write(f"\n{json.dumps({'why': why})}\n")
    return 0


def _not_here(why: str) -> int:
    sys.stderr.write(f"{why}\n")
    return NOT_HERE


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a normal exit may hang while it tears down a context that a kernel poisoned
