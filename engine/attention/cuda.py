"""Attention on GPUs: FlashInfer's paged kernels where they import and take the layer, torch's own for all else.

choose_library --FlashInfer, or why not--> CudaAttention --each layer--> the library, or torch_paged.py
"""

import importlib
import importlib.metadata
import importlib.util
from typing import Protocol

import torch

from devices.interface import Device
from engine.attention.flashinfer_paged import FlashInferAttention
from engine.attention.interface import AttentionOptions, DecodeAttention, GraphBackend, StepAttention
from engine.attention.tables import DecodeInputs, HostTables
from engine.attention.torch_paged import TorchPagedAttention
from engine.step_metadata import StepMetadata
from telemetry.logs import EventLogger

_log = EventLogger("engine")
_FLASHINFER = "flashinfer"


class PagedLibrary(GraphBackend, Protocol):
    """Paged kernels of another project, for the layers that they take."""

    def takes(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> bool:  # fmt: skip
        """Whether it attends such a layer."""
        ...


def make_cuda_attention(device: Device) -> "CudaAttention":
    """Return the backend with the library that this machine has; why stands in `note`."""
    library, note = choose_library(device)
    return CudaAttention(library, note)


def choose_library(device: Device) -> tuple[PagedLibrary | None, str]:
    """Return the library, None where torch attends alone, and a line for people."""
    if importlib.util.find_spec(_FLASHINFER) is None:
        return None, "attention by torch: flashinfer is not installed"
    try:
        module = importlib.import_module(_FLASHINFER)
        library = FlashInferAttention(module, device)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return None, f"attention by torch: flashinfer cannot be used: {error}"
    return library, f"attention by flashinfer {importlib.metadata.version('flashinfer-python')}"


class CudaAttention:
    """The CUDA backend. One thread calls it."""

    def __init__(self, library: PagedLibrary | None = None, note: str = "attention by torch") -> None:
        """Layers that `library` does not take are torch's, and all are from its first failure on."""
        self.library, self.note = library, note
        self.torch = TorchPagedAttention()
        self.needs_narrow = library is None
        """Whether a layer has gathered keys: then tables are to be no wider than needed."""

    def plan(self, metadata: StepMetadata) -> "CudaStep":
        """See AttentionBackend."""
        library = None if self.library is None else self.library.plan(metadata)
        return CudaStep(self, self.torch.plan(metadata), library)

    def plan_decode(self, inputs: DecodeInputs) -> "CudaDecode":
        """See GraphBackend."""
        library = None if self.library is None else self.library.plan_decode(inputs)
        return CudaDecode(self, self.torch.plan_decode(inputs), library)

    def table_width(self, needed: int, most: int) -> int:
        """See GraphBackend; a library reads no more than each row needs, however wide the tables are."""
        return self.torch.table_width(needed, most) if self.needs_narrow else most

    def give_up(self, error: Exception) -> None:
        """Go on with torch alone: the library failed."""
        _log.warning("attention_fallback", op=type(self.library).__name__, backend="torch", error=str(error))
        self.library, self.needs_narrow = None, True
        self.note = f"attention by torch: the library failed: {error}"


class CudaStep:
    """One step; each layer goes to who takes it."""

    def __init__(self, backend: CudaAttention, by_torch: StepAttention, by_library: StepAttention | None) -> None:
        self._backend, self._torch, self._library = backend, by_torch, by_library

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write: one launch for keys and one for values."""
        self._torch.write(keys, values, new_keys, new_values)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        backend = self._backend
        if self._library is not None and backend.library is not None:
            if backend.library.takes(query, keys, values, options):
                try:
                    return self._library.attend(query, keys, values, options)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # noqa: BLE001 - another project's kernels: what they raise is not known
                    backend.give_up(error)
            backend.needs_narrow = True
        return self._torch.attend(query, keys, values, options)


class CudaDecode:
    """Implements DecodeAttention for the library and torch together."""

    def __init__(
        self, backend: CudaAttention, by_torch: DecodeAttention, by_library: DecodeAttention | None
    ) -> None:  # fmt: skip
        self._backend, self._torch, self._library = backend, by_torch, by_library

    def prepare(self, host: HostTables) -> None:
        """See DecodeAttention."""
        if self._library is not None:
            self._library.prepare(host)

    def step(self) -> CudaStep:
        """See DecodeAttention."""
        library = None if self._library is None else self._library.step()
        return CudaStep(self._backend, self._torch.step(), library)
