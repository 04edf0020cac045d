"""Compute logits of chosen rows again from a network's last hidden states, a slice at a time.

A long prompt's logits do not fit in memory at once, and the operations after the output matrix (soft caps, scales)
differ between models. So the network's own forward runs on rows of the hidden states that its decoder just returned.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.sampling.logprobs import rows_at_once
from wire.errors import InternalError


class RowHead:
    """Keeps the hidden states of one step and computes logits of their rows. `network` is a transformers model."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._parts = [part for part in network.modules() if isinstance(part, PreTrainedModel) and part is not network]
        self._kept: tuple[Any, Any] | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the decoder's output in this block. Of the network's inner models, the decoder returns last."""
        hooks = [part.register_forward_hook(self._keep_output) for part in self._parts]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def states(self) -> torch.Tensor:
        """The kept hidden states, after the final norm: [num_tokens, hidden_size]."""
        if self._kept is None or not hasattr(self._kept[1], "last_hidden_state"):
            raise InternalError(f"{type(self._network).__name__} has no decoder whose hidden states can be kept")
        states: torch.Tensor = self._kept[1].last_hidden_state[0]
        return states

    def slices(self, rows: torch.Tensor, vocab_size: int) -> Iterator[torch.Tensor]:
        """Yield the logits of `rows` of the last step in order, [rows of a slice, vocab_size]; drop the kept states."""
        kept, self._kept = self._kept, None
        if kept is None or not hasattr(kept[1], "last_hidden_state"):
            raise InternalError(f"{type(self._network).__name__} has no decoder whose hidden states can be kept")
        size = rows_at_once(vocab_size)
        for start in range(0, len(rows), size):
            yield self._run(*kept, rows[start : start + size])

    def _keep_output(self, decoder: Any, _inputs: Any, output: Any) -> None:
        self._kept = decoder, output

    def _run(self, decoder: Any, output: Any, rows: torch.Tensor) -> torch.Tensor:
        """Run the network with a decoder that returns these rows of its last output."""
        chosen = type(output)(last_hidden_state=output.last_hidden_state[:, rows])
        decoder.forward = lambda *_, **__: chosen
        try:
            logits: torch.Tensor = self._network(input_ids=torch.zeros_like(rows)[None], use_cache=False).logits[0]
        finally:
            del decoder.forward
        return logits
