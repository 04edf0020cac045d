"""Load a transformers network: build it without memory, then fill it tensor by tensor from Weights.

meta device (shapes only) --shard--> shapes of one rank --materialise--> ready to run

A checkpoint whose stored tensors need a conversion not implemented here is loaded whole by transformers.
"""

import copy
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from engine.added_biases import add_biases, check_biases
from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.load_progress import LoadProgress
from engine.checkpoints.materialise import DimensionRanges, cut_shape, materialise
from engine.checkpoints.tensor_sources import TensorSource, find_sources, ignored_missing
from engine.checkpoints.weights import Weights
from wire.errors import ConfigError

Shard = Callable[[Any], Mapping[str, DimensionRanges]]
"""Changes a network on the meta device to one rank's part, and returns the cuts of its tensors by name."""


Keep = Callable[[Any, Mapping[str, TensorSource], Mapping[str, DimensionRanges], torch.device], None]
"""Replaces layers of a network on the meta device by others that already have their weights, cut, on the device."""


_SCALES = ("_scale", "_scale_inv")  # added to the name of a float8 weight


@dataclass(frozen=True, slots=True)
class LoadedNetwork:
    """A network ready to run; `note` describes anything unusual about how it was loaded."""

    network: Any
    note: str | None = None


def load_network(
    checkpoint: Checkpoint, weights: Weights, *, dtype: str, attention: str | None, shard: Shard | None = None,
    device: torch.device | None = None, keep: Keep | None = None, adds_biases: bool = False,
) -> LoadedNetwork:  # fmt: skip
    """Return the network with its weights in `dtype`. Raises ConfigError that names missing weights.

    `attention` names the implementation (None: transformers' default); `shard` cuts the network to one rank's part.
    Each tensor moves to `device` when it is made, so the host never holds them all. `keep` is called after `shard`.
    With `adds_biases`, layers get those of their biases that the network has no place for (engine/added_biases.py).
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # no table of missing weights: ours is one line
    device = device or torch.device("cpu")
    network = build_network(checkpoint, dtype=dtype, attention=attention)
    if adds_biases:
        add_biases(network, weights)
    sources = find_sources(network, weights)
    _check_floats(checkpoint, network, sources.by_name, weights)
    if adds_biases:
        check_biases(sources.by_name, weights)
    missing = _missing(network, sources.by_name)
    special = [*sources.converted, *ignored_missing(network, missing)]
    if special:
        what = special[0]
        if shard is not None:
            raise ConfigError(
                f"{checkpoint.path}: {what} needs a conversion by transformers, and such a checkpoint cannot be "
                "sharded across ranks: use --tensor-parallel-size 1"
            )
        loaded = load_with_transformers(checkpoint, weights, dtype, attention, adds_biases=adds_biases)
        return LoadedNetwork(loaded.to(device), f"weights loaded by transformers, which converts {what}")
    _check_complete(checkpoint, network, sources.by_name, weights, missing)
    _widen(network, dtype)
    cuts = {} if shard is None else shard(network)
    if keep is not None:
        keep(network, sources.by_name, cuts, device)
    _fill(network, sources.by_name, weights, cuts, device)
    _take_generation_config(network, checkpoint)
    return LoadedNetwork(network.eval())


def build_network(checkpoint: Checkpoint, *, dtype: str, attention: str | None) -> Any:
    """Return the network on the meta device: only shapes and dtypes. Raises ConfigError."""
    kwargs = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(checkpoint.config), dtype=getattr(torch, dtype), trust_remote_code=False, **kwargs
            )
    except (ValueError, RuntimeError, ImportError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{checkpoint.path}: its network cannot be built: {error}") from error


def _missing(network: Any, sources: Mapping[str, TensorSource]) -> list[str]:
    """Return the tensors that the checkpoint does not have under any of their names."""
    tensors = network.state_dict(keep_vars=True)
    found = {id(tensors[name]) for name in sources if name in tensors}
    return sorted(name for name, tensor in tensors.items() if id(tensor) not in found)


def _check_complete(
    checkpoint: Checkpoint, network: Any, sources: Mapping[str, TensorSource], weights: Weights, missing: list[str]
) -> None:
    if missing:
        raise ConfigError(f"{checkpoint.path}: missing keys ({len(missing)}), the first is {missing[0]}")
    wrong = []
    for name, tensor in network.state_dict().items():
        try:
            stored = sources[name].shape(weights) if name in sources else tuple(tensor.shape)
        except ValueError as error:
            raise ConfigError(f"{checkpoint.path}: {error}") from error
        if stored != tuple(tensor.shape):
            wrong.append(f"{name} is stored as {stored}, but config.json implies {tuple(tensor.shape)}")
    if wrong:
        raise ConfigError(f"{checkpoint.path}: mismatched keys ({len(wrong)}): {min(wrong)}")


def _check_floats(
    checkpoint: Checkpoint, network: Any, sources: Mapping[str, TensorSource], weights: Weights
) -> None:  # fmt: skip
    """Raise ConfigError for integers, and for float8 with a scale beside it: these are codes, not weights."""
    all_stored = frozenset(weights.names)
    floats = [name for name, tensor in network.state_dict().items() if tensor.is_floating_point()]
    stored = (name for one in floats if one in sources for column in sources[one].columns for name in column)
    for name, dtype in ((name, weights.dtype(name)) for name in stored):
        has_scale = dtype.itemsize == 1 and not all_stored.isdisjoint(f"{name}{end}" for end in _SCALES)
        if has_scale or not dtype.is_floating_point:
            what = str(dtype).removeprefix("torch.")
            raise ConfigError(f"{checkpoint.path}: {name} is stored as {what}, and no quantization config describes it")


def _widen(network: Any, dtype: str) -> None:
    """Set meta tensors to the wider dtype that the model's class requires for them, as transformers does."""
    plan: dict[str, torch.dtype] = network._get_dtype_plan(getattr(torch, dtype))
    patterns = [(re.compile(key.replace("*", ".*")), wide) for key, wide in plan.items()]
    for name, tensor in network.state_dict(keep_vars=True).items():
        wide = next((wide for pattern, wide in patterns if pattern.search(name)), None)
        if wide is not None and tensor.is_floating_point():
            new = tensor.detach().to(wide)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            _put(network, name, tensor, torch.nn.Parameter(new, requires_grad=False) if is_parameter else new)


@torch.no_grad()
def _fill(
    network: Any, sources: Mapping[str, TensorSource], weights: Weights, cuts: Mapping[str, DimensionRanges],
    device: torch.device,
) -> None:  # fmt: skip
    """Fill every tensor: parameters and persistent buffers from `weights`; other buffers are computed."""
    tensors = network.state_dict(keep_vars=True)
    names = [name for name in tensors if name in sources]
    total = sum(_stored_bytes(sources[name], weights, cuts.get(name)) for name in names)
    made: dict[int, list[torch.Tensor]] = {}  # the new tensors for an old one that has several names
    with LoadProgress(total) as progress:
        for name in names:
            old = tensors[name]
            new = materialise(sources[name], weights, cuts.get(name), old.dtype, progress.advance).to(device)
            new = torch.nn.Parameter(new, requires_grad=False) if isinstance(old, torch.nn.Parameter) else new
            same = next((one for one in made.get(id(old), ()) if torch.equal(one, new)), None)
            if same is None:
                made.setdefault(id(old), []).append(new)
            _put(network, name, old, new if same is None else same)
    _tie(network, tensors, names)
    for name, buffer in [*network.named_non_persistent_buffers()]:
        _put(network, name, buffer, torch.empty_like(buffer, device="cpu"))
    network.initialize_weights()  # skips tensors that _put has marked
    network.to(device)  # moves the buffers; computed on the CPU, they are the same on every device


def _stored_bytes(source: TensorSource, weights: Weights, cut: DimensionRanges | None) -> int:
    if cut is not None and cut.is_zero:
        return 0
    return torch.Size(cut_shape(source, weights, cut)).numel() * weights.dtype(source.columns[0][0]).itemsize


def _put(network: Any, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    module = network.get_submodule(path)
    if isinstance(old, torch.nn.Parameter) or last not in module._non_persistent_buffers_set:
        new._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(module, last, new)


def _tie(network: Any, tensors: Mapping[str, torch.Tensor], stored: list[str]) -> None:
    """For each name that the checkpoint does not store, use the new tensor of the stored name to which it is tied."""
    made = {id(tensors[name]): name for name in reversed(stored)}
    for name, old in tensors.items():
        if name not in stored:
            _put(network, name, old, network.get_parameter_or_buffer(made[id(old)]))


def _take_generation_config(network: Any, checkpoint: Checkpoint) -> None:
    if network.can_generate() and (checkpoint.path / "generation_config.json").is_file():
        network.generation_config = GenerationConfig.from_pretrained(checkpoint.path, local_files_only=True)


class _Lazy:
    """A tensor for transformers' loader, read when it is sliced; the loader slices tensors from several threads."""

    def __init__(self, weights: Weights, name: str, lock: threading.Lock) -> None:
        self._weights, self._name, self._lock = weights, name, lock

    def __getitem__(self, key: object) -> torch.Tensor:
        with self._lock:
            return self._weights.read(self._name)


def load_with_transformers(
    checkpoint: Checkpoint, weights: Weights, dtype: str, attention: str | None, *, adds_biases: bool = False
) -> Any:  # fmt: skip
    """Return the whole network as loaded by transformers from `weights`. Raises ConfigError."""
    config, lock = copy.deepcopy(checkpoint.config), threading.Lock()
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # `weights` are dequantised
    try:
        network, report = checkpoint.network_class.from_pretrained(
            None, config=config, state_dict={name: _Lazy(weights, name, lock) for name in weights.names},
            dtype=getattr(torch, dtype), attn_implementation=attention, ignore_mismatched_sizes=True,
            output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"{checkpoint.path}: its weights cannot be loaded: {error}") from error
    for what in ("missing_keys", "mismatched_keys"):
        if report[what]:
            names = sorted(str(key) for key in report[what])
            raise ConfigError(f"{checkpoint.path}: {what.replace('_', ' ')} ({len(names)}), the first is {names[0]}")
    if adds_biases:
        add_biases(network, weights)
    _take_generation_config(network, checkpoint)
    return network.eval()
