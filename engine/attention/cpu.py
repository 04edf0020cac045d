"""Attention on CPU: our own kernel where it is built and supports the layer, else torch."""

import torch

from engine.attention.interface import AttentionOptions
from engine.attention.native import NativeAttention, NativeStep, supports
from engine.attention.torch_cpu import TorchCpuAttention, TorchCpuStep
from engine.step_metadata import StepMetadata
from native.engine_library import Threads


class CpuAttention:
    """The CPU backend. One thread calls it."""

    def __init__(self, threads: Threads | None = None) -> None:
        """`threads` run the kernel and must outlive this object.

        Without them, or if their kernel is plain C, torch computes.
        """
        self._native = NativeAttention(threads) if threads is not None and threads.isa != "plain" else None
        self._torch = TorchCpuAttention()

    def plan(self, metadata: StepMetadata) -> "CpuStep":
        """Plan for the kernel and for torch: one model may need both."""
        native = None if self._native is None else self._native.plan(metadata)
        return CpuStep(native, self._torch.plan(metadata))


class CpuStep:
    """One step: each layer runs on our kernel where it supports the layer, else on torch."""

    def __init__(self, native: NativeStep | None, torch_step: TorchCpuStep) -> None:
        self._native = native
        self._torch = torch_step

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write."""
        step = self._native if self._native is not None and supports(new_keys, keys, values) else self._torch
        step.write(keys, values, new_keys, new_values)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        step = self._native if self._native is not None and supports(query, keys, values) else self._torch
        return step.attend(query, keys, values, options)
