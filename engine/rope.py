"""Rotary embeddings whose frequencies depend on the sequence length, computed per row of the step.

transformers uses the longest position of the whole batch. Its rotary modules multiply positions by frequencies, so with
frequencies per row each row gets the result it would get alone; a module for which this does not hold is refused.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.rope_lengths import DYNAMIC, LENGTH_TYPES, rope_lengths, token_lengths
from engine.step import BatchSequence
from engine.transfers import upload
from wire.errors import ConfigError


class StepRope:
    """Owns the lengths of the step in progress; the network's rotary modules read them."""

    def __init__(self) -> None:
        self.lengths: Sequence[int] = ()
        self.device = torch.device("cpu")

    def begin(self, sequences: Sequence[BatchSequence], device: torch.device) -> None:
        """Set the lengths of the rows of the next forward pass, and its device."""
        self.lengths = [n for one in sequences for n in token_lengths(one.start, one.count, one.prompt_length)]
        self.device = device


class RowRotary(torch.nn.Module):
    """Wraps a rotary module of transformers so that it computes each row with that row's frequencies."""

    def __init__(self, rotary: Any, step: StepRope) -> None:
        super().__init__()
        self._rotary, self._step = rotary, step
        self._frequencies = Frequencies(rotary)
        self._compute = _plain_forward(rotary)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """Return the module's output. x: [1, num_tokens, hidden], position_ids: [1, num_tokens]."""
        self._rotary.inv_freq = upload(self._frequencies(self._step.lengths), self._step.device)
        return self._compute(self._rotary, x, position_ids)


class Frequencies:
    """Inverse frequencies by length, from transformers' formulas; on the CPU, so they are the same on every device."""

    def __init__(self, rotary: Any) -> None:
        lengths = rope_lengths(rotary.config)
        assert lengths is not None, "only modules of LENGTH_TYPES are replaced"
        self.short_length, self._rope_type, self._config = lengths.short_length, lengths.rope_type, rotary.config
        self._short: torch.Tensor = rotary.original_inv_freq.clone().cpu()
        self._long = self._past_short_length(self.short_length + 1)

    def __call__(self, lengths: Sequence[int]) -> torch.Tensor:
        """Return [num_tokens, dim / 2] for the length of each token."""
        # All lengths up to short_length have the same frequencies.
        distinct = sorted({max(length, self.short_length) for length in lengths})
        places = {length: place for place, length in enumerate(distinct)}
        rows = torch.tensor([places[max(length, self.short_length)] for length in lengths])
        return torch.stack([self._frequencies_for(length) for length in distinct]).index_select(0, rows)

    def _frequencies_for(self, length: int) -> torch.Tensor:
        if length <= self.short_length:
            return self._short
        return self._past_short_length(length) if self._rope_type == DYNAMIC else self._long

    def _past_short_length(self, length: int) -> torch.Tensor:
        """Compute frequencies as transformers does: from a tensor, so the arithmetic is float32, not Python's."""
        compute = ROPE_INIT_FUNCTIONS[self._rope_type]
        frequencies: torch.Tensor = compute(self._config, self._short.device, seq_len=torch.tensor(length))[0]
        return frequencies


def check_rotaries(network: Any) -> None:
    """Raise ConfigError for a rotary module that cannot run row by row. The network may be on the meta device."""
    for _, _, rotary in _rotaries(network):
        twin = type(rotary)(rotary.config)
        if not _agrees(twin, Frequencies(twin), _plain_forward(twin)):
            rope_type = rotary.config.rope_parameters["rope_type"]
            raise ConfigError(f"{type(rotary).__name__} cannot compute rope type {rope_type} row by row: not supported")


def ignore_lengths(network: Any) -> None:
    """Let a network on the meta device run: lengths cannot be read there, and frequencies do not matter."""
    for _, _, rotary in _rotaries(network):
        rotary.rope_type = "default"


def rotate_by_sequence(network: Any) -> StepRope | None:
    """Replace the rotary modules that depend on lengths; return the StepRope they read, None if there are none."""
    found = list(_rotaries(network))
    step = StepRope()
    for parent, name, rotary in found:
        setattr(parent, name, RowRotary(rotary, step))
    return step if found else None


def forget_lengths(network: Any) -> None:
    """Reset plain transformers' rotary modules: rope type dynamic keeps the frequencies of the longest sequence."""
    for _, _, rotary in _rotaries(network):
        rotary.inv_freq = rotary.original_inv_freq.clone()
        rotary.max_seq_len_cached = rotary.original_max_seq_len


def _rotaries(network: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (parent, name, module) of each rotary module of LENGTH_TYPES."""
    for path, module in list(network.named_modules()):
        if getattr(module, "rope_type", None) in LENGTH_TYPES and hasattr(module, "original_inv_freq"):
            parent, _, name = path.rpartition(".")
            yield network.get_submodule(parent), name, module


def _plain_forward(rotary: Any) -> Callable[..., Any]:
    """Return the module's forward without the decorator that updates frequencies by the longest position."""
    forward: Callable[..., Any] = inspect.unwrap(type(rotary).forward)
    return forward


@torch.inference_mode()
def _agrees(rotary: Any, frequencies: Frequencies, forward: Callable[..., Any]) -> bool:
    """Return whether rows of different lengths in one pass equal rows computed alone, and lengths have an effect."""
    short_length, positions = frequencies.short_length, torch.arange(3, 9)[None]
    mixed, alone = _rows(rotary, forward, frequencies([short_length, 2 * short_length] * 3), positions), []
    for length in (short_length, 2 * short_length):
        alone.append(_rows(rotary, forward, frequencies([length])[0], positions))
    expected = torch.stack([alone[row % 2][row] for row in range(6)])
    return torch.equal(mixed, expected) and not torch.equal(alone[0], alone[1])


def _rows(rotary: Any, forward: Callable[..., Any], inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return all the module's outputs, joined, one row per position."""
    rotary.inv_freq = inv_freq
    made = forward(rotary, torch.zeros(1, positions.shape[1], 1), positions)
    tensors = made if isinstance(made, tuple) else (torch.view_as_real(made),)
    return torch.cat([tensor[0].flatten(1) for tensor in tensors], dim=1)
