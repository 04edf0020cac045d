"""pytorch_model.bin -> safetensors: the only place that reads a pickle, with weights_only, in a separate process.

torch's weights_only reader makes tensors and plain containers; any other name in a file is refused and never called.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.checkpoints.bin_files import BinFiles, check_archive
from wire.errors import ConfigError

_HEADS = ("lm_head.weight", "embed_out.weight")
_GLOBAL = re.compile(r"Unsupported (?:global|class|operand)[^:]*: (?:GLOBAL )?(\S+)|GLOBAL (\S+)")
_REASON = re.compile(r"WeightsUnpickler error: (.+)")


def convert_bin(bins: BinFiles, target: Path, *, tied: bool) -> None:
    """Write the tensors of `bins` into folder `target`, one safetensors file for each .bin file.

    `tied`: the config lets the output layer share the embeddings, so a head equal to the embeddings is left out.
    Raises ConfigError, naming the file, if it contains anything but plain tensors.
    """
    weight_map: dict[str, str] = {}
    total, count = 0, len(bins.files)
    for number, file in enumerate(bins.files, start=1):
        name = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        tensors = _tensors(file, tied=tied)
        _check_names(file, tensors, weight_map, bins.names_by_file.get(file.name, frozenset()) - _left_out(tied))
        save_file(tensors, target / name, metadata={"format": "pt"})
        (target / name).chmod(0o644)  # safetensors makes it readable by the owner only
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensors(file: Path, *, tied: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of `file`, each with its own memory, as safetensors requires."""
    check_archive(file)
    state = _load(file)
    if not isinstance(state, Mapping) or not state:
        held = "none" if isinstance(state, Mapping) else f"a value of type {type(state).__name__}"
        raise ConfigError(f"{file} must contain named tensors, but contains {held}")
    strange = next((name for name, value in state.items() if not _is_plain(name, value)), None)
    if strange is not None:
        raise ConfigError(f"{file}: {_why_not_plain(strange, state[strange])}")
    kept = {name: tensor for name, tensor in state.items() if not (tied and _is_embeddings(name, state))}
    seen: set[int] = set()
    return {name: _own(tensor.detach(), seen) for name, tensor in kept.items()}


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        text = str(error)
        found = _GLOBAL.search(text)
        if found:
            raise ConfigError(
                f"{file} names {found[1] or found[2]}, which is not a tensor: a pickle can run code, so it is refused "
                "(no code was run); get the model as safetensors"
            ) from error
        reason = _REASON.search(text)
        message = (reason[1] if reason else text.splitlines()[0] if text else type(error).__name__)[:300]
        raise ConfigError(f"{file} cannot be read as plain tensors: {message}") from error


def _is_plain(name: object, value: object) -> bool:
    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        return False
    return value.layout is torch.strided and not value.is_quantized and value.device.type == "cpu"


def _why_not_plain(name: object, value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{name!r} is of type {type(value).__name__}, but must be a tensor"
    if not isinstance(name, str):
        return f"the tensor name {name!r} is of type {type(name).__name__}, but must be text"
    form = "quantised" if value.is_quantized else f"{value.layout} on {value.device.type}"
    return f"{name!r} is {form}, but must be a dense, unquantised tensor on cpu"


def _is_embeddings(name: str, state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the tensor is an output layer that repeats the embeddings under another name."""
    if name not in _HEADS:
        return False
    head = state[name]
    alike = (other for key, other in state.items() if key not in _HEADS and "embed" in key and _alike(head, other))
    return any(torch.equal(head, other) for other in alike)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _own(tensor: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """Return the tensor, contiguous; a copy if it is a view of a larger storage, or its storage is in `seen`."""
    storage = tensor.untyped_storage()
    is_whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in seen
    seen.add(storage.data_ptr())
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


def _left_out(tied: bool) -> frozenset[str]:
    return frozenset(_HEADS) if tied else frozenset()


def _check_names(file: Path, names: Collection[str], before: Mapping[str, str], wanted: Collection[str]) -> None:
    missing = sorted(set(wanted) - set(names))
    if missing:
        raise ConfigError(f"{file} has no tensor {missing[0]}, which the index lists for it")
    twice = sorted(set(names) & before.keys())
    if twice:
        raise ConfigError(f"{file} has the tensor {twice[0]}, which an earlier file has too")
