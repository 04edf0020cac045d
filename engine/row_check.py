"""Check that a network's rows interact only in attention, and use the positions that each step passes.

check_uncounted   every network, before its weights are read where possible: does it count the step's rows as positions?
check_rows        loaded networks of a type that no test covers: do their logits depend on neighbouring rows?
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.attention.interface import AttentionOptions
from engine.attention.registered import NAME, attach
from engine.models.families import support_of
from engine.rope_lengths import longest_sequence
from wire.errors import ConfigError

_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.05}
_PLACE = 3
_NEIGHBOURS = (3, 11)
_TOKENS = (7, 23, 42)  # the smallest gap counts: rounding may route one of them to other experts
_NUM_ROWS = 37  # a size that no other tensor of a network has
_COUNTING = frozenset({torch.arange, torch.cumsum, torch.Tensor.cumsum, torch.Tensor.cumsum_})


class _Alone:
    """Attention of each token only to itself: its output is its value. Keeps the last token's queries and keys."""

    def __init__(self) -> None:
        self.inputs: dict[int, torch.Tensor] = {}  # [heads, dim] of queries and keys, by layer

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See LayerHandler.run_layer."""
        self.inputs[layer] = torch.cat([query[:, -1], key[:, -1]]).float()
        return value.repeat_interleave(query.shape[0] // value.shape[0], dim=0).transpose(0, 1).contiguous()


class _Uncounted(TorchFunctionMode):
    """Raises ConfigError in its block if torch counts, or sums cumulatively, along a dimension of _NUM_ROWS."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, then check its result."""
        options = kwargs or {}
        made = func(*args, **options)
        if func in _COUNTING:
            along = 0 if func is torch.arange else options.get("dim", args[1] if len(args) > 1 else 0)
            if made.shape[along] == _NUM_ROWS:
                raise ConfigError(f"its layers count the rows of a step ({func.__name__}) as positions: not supported")
        return made


@torch.inference_mode()
def check_uncounted(network: Any) -> None:
    """Raise ConfigError if a network numbers the rows of a step itself instead of using the positions passed.

    `network` runs our attention. It may be on the meta device: then RuntimeError is raised if it reads tensor data.
    """
    attach(network, _Alone())
    place = next(iter(network.parameters())).device
    rows = torch.zeros(1, _NUM_ROWS, dtype=torch.int64, device=place)
    with _Uncounted():
        network(input_ids=rows, position_ids=rows, use_cache=False)


def check_untried(network: Any, dtype: str) -> None:
    """Check the rows of a network whose model type the tests do not cover. Raises ConfigError."""
    if not support_of(network.config.model_type).is_tested:
        check_rows(network, dtype)


def check_rows(network: Any, dtype: str) -> None:
    """Raise ConfigError if a row's logits depend on its neighbours, or on its place in the step.

    `network` runs our attention, in `dtype`. Attention is disabled, so that any other state has an effect: that of a
    convolution, a recurrence, or positions counted from the start of the step. Queries and keys are compared too, at a
    low position and at the last one, because some models scale or rotate queries differently at high positions.
    """
    assert network.config._attn_implementation == NAME
    last = longest_sequence(network.config.get_text_config(decoder=True))
    for position in (_PLACE, _PLACE if last is None else last - 1):
        gap = min(_largest_difference(network, token_id, position) for token_id in _TOKENS)
        if not gap <= _TOLERANCE[dtype]:
            raise ConfigError(
                f"{network.config.model_type}: logits differ by {gap:.2g} of their size at position {position} if "
                f"another sequence is in the step, but the limit is {_TOLERANCE[dtype]}: layers that keep a state "
                "besides attention are not supported"
            )


def _largest_difference(network: Any, token_id: int, position: int) -> float:
    """Return the largest relative difference between a token's logits, queries and keys with a neighbour and alone."""
    alone = _run_last_token(network, [token_id], position)
    with_neighbour = [_run_last_token(network, [neighbour, token_id], position) for neighbour in _NEIGHBOURS]
    pairs = [pair for other in with_neighbour for pair in zip(alone, other, strict=True)]
    return max(float((other - one).abs().max() / one.abs().max()) for one, other in pairs)


@torch.inference_mode()
def _run_last_token(network: Any, token_ids: list[int], position: int) -> list[torch.Tensor]:
    """Return the last token's logits, and each layer's queries and keys; it is at `position` of its own sequence."""
    attach(network, alone := _Alone())
    positions, place = [0] * (len(token_ids) - 1) + [position], next(iter(network.parameters())).device
    logits: torch.Tensor = network(
        input_ids=torch.tensor([token_ids]).to(place), position_ids=torch.tensor([positions]).to(place), use_cache=False
    ).logits
    return [logits[0, -1].float(), *(alone.inputs[layer] for layer in sorted(alone.inputs))]
