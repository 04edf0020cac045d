"""Sampling by torch, checked against the native kernels where there are any."""

import functools

import torch

from engine.fused.structs import declare
from engine.sampling import sampler
from engine.sampling.native_chooser import NativeChooser
from engine.sampling.sampler import Sampled, TorchChooser
from engine.step import SampleRow
from native.cache import NoNative
from native.engine_library import Threads, build_engine


@functools.cache
def native_chooser() -> NativeChooser | None:
    """Return the native chooser; None without a compiler."""
    try:
        library = build_engine()
    except NoNative:
        return None
    return chooser_of(library.threads(1))


def chooser_of(threads: Threads) -> NativeChooser:
    """Return the native chooser, for any tensor, on these threads."""
    functions = declare(threads.library)
    return NativeChooser(
        functions.best, functions.draw, threads, lambda one: (one.data_ptr(), *one.shape, one.stride(0))
    )


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> Sampled:
    """Return what torch chooses; the native kernels choose the same and refuse the same rows."""
    sampled, native = sampler.sample(logits, rows, TorchChooser()), native_chooser()
    if native is not None and logits.dtype == torch.float32:
        ours = sampler.sample(logits, rows, native)
        refused = {row for row, _ in sampled.failures}
        chosen = [[token for row, token in enumerate(one.token_ids) if row not in refused] for one in (ours, sampled)]
        assert chosen[0] == chosen[1]
        assert [(row, str(why)) for row, why in ours.failures] == [(row, str(why)) for row, why in sampled.failures]
    return sampled
