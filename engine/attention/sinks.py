"""Sinks for kernels that have none: applied to the output, using the logarithm of the softmax's sum."""

import torch


def apply_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the output of a softmax whose sum includes each head's sink.

    With sinks, the weights of the keys no longer add up to 1 but to exp(lse) / (exp(lse) + exp(sink)), which is
    sigmoid(lse - sink).
    output: [rows, num_heads, dim]; lse: [rows, num_heads] float32, natural logarithm; sinks: [num_heads].
    """
    return (output.float() * torch.sigmoid(lse - sinks.float())[..., None]).to(output.dtype)
