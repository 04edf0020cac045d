"""Choose the libraries that run a network's modules on a GPU: FlashInfer where it supports them, else torch."""

from typing import Any

from devices.flashinfer_package import find_flashinfer
from engine.cuda.flashinfer_ops import FlashInferOps
from engine.cuda.torch_ops import TorchOps
from engine.modules import replace


def replace_modules(network: Any) -> tuple[str, ...]:
    """See engine/modules/replace.py."""
    flashinfer, name = find_flashinfer()
    libraries = () if flashinfer is None else (FlashInferOps(flashinfer, name),)
    return replace.replace_modules(network, (*libraries, TorchOps()))
