"""Find the tokens of top_p with FlashInfer, without sorting the vocabulary.

top_p_renorm_probs(probs, top_p, is_deterministic)  | [rows, vocab] and [rows] float32; a token outside the nucleus
                                                    | gets 0; tokens as likely as the last one in it stay

Only its choice of tokens is used: weights, sums and the draw are the sampler's. top_k stays with torch.topk, which
sorts no more than k: the barrier between blocks in FlashInfer's top_k kernels has hung GPUs, and left wrong tokens
(flashinfer-ai/flashinfer 3610, 4126). Names and rules are those of flashinfer-python 0.7.2; nothing here has run on a
GPU yet.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from devices.flashinfer_package import find_flashinfer
from devices.interface import Device
from engine.kernel_check import kernel_check
from engine.sampling.sampler import Nucleus, torch_nucleus
from telemetry.logs import EventLogger

_log = EventLogger("engine")
_OP = "top_p_renorm_probs"
_OFF = float("-inf")
_CHECKED = ((0.1, 1.0), (0.5, 0.7), (0.9, 1.0), (0.95, 2.0), (0.999, 1.5))
"""Values of top_p in the check at load, with the temperatures of their random scores."""
_TIED = 1e-4
"""Share of the weights by which two nuclei may differ: where float32 sums tie, the last token may be in or out."""


def find_nucleus(device: Device, vocab_size: int) -> Nucleus | None:
    """Return FlashInfer's nucleus where it is installed and agrees with torch's on random scores, else None."""
    module, name = find_flashinfer()
    op = getattr(module, _OP, None)
    if op is None:
        return None
    nucleus = flashinfer_nucleus(op)
    here = partial(why_not, nucleus, device.torch_device, vocab_size)
    why = kernel_check(device)("nucleus", {"vocab_size": vocab_size}, here)
    if why is None:
        return nucleus
    _log.warning("sampling_fallback", op=_OP, library=name, backend="torch", error=why)
    return None


def check_nucleus(device: Device, vocab_size: int) -> str | None:
    """Return why FlashInfer's nucleus must not be used on this device, None if it may be."""
    return why_not(flashinfer_nucleus(getattr(find_flashinfer()[0], _OP)), device.torch_device, vocab_size)


def flashinfer_nucleus(op: Callable[..., Any]) -> Nucleus:
    """Return the nucleus by FlashInfer's `op`."""

    def nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        numbers = scores.nan_to_num(nan=0.0, neginf=_OFF)  # the kernel for small vocabularies never ends on NaN
        probs = numbers.softmax(dim=-1)
        return scores.masked_fill(op(probs, top_p.flatten(), is_deterministic=True) <= 0, _OFF)

    return nucleus


def why_not(nucleus: Nucleus, device: torch.device, vocab_size: int) -> str | None:
    """Return how `nucleus` fails, or finds tokens other than torch's, on `device`; None if it does not."""
    try:
        return _check_nucleus(nucleus, device, vocab_size)
    except Exception as error:  # noqa: BLE001 - a library may raise anything, such as for a missing compiler
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


@torch.inference_mode()
def _check_nucleus(nucleus: Nucleus, device: torch.device, vocab_size: int) -> str | None:
    values = torch.randn(len(_CHECKED), vocab_size, generator=torch.Generator().manual_seed(1))
    scores = values * 3 / torch.tensor([temperature for _, temperature in _CHECKED])[:, None]
    scores = (scores - scores.amax(dim=-1, keepdim=True)).to(device)
    top_p = torch.tensor([share for share, _ in _CHECKED])[:, None].to(device)
    theirs, ours = (one(scores, top_p).cpu() > _OFF for one in (nucleus, torch_nucleus))
    weights = scores.cpu().softmax(dim=-1)
    for (share, _), difference in zip(_CHECKED, ((theirs != ours) * weights).sum(dim=-1).tolist(), strict=True):
        if difference > _TIED:
            return f"for top_p {share:g}, tokens with {difference:.3g} of the probability are in only one nucleus"
    return None
