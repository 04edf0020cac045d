"""Attention on GPUs: FlashInfer's paged kernels where they import and support the layer, else torch's own.

choose_library --FlashInfer, else torch's flash kernel, and the reason--> CudaAttention
CudaAttention  --each layer--> the library where it supports the layer, else torch_paged.py
"""

import importlib
from typing import Protocol

import torch

from devices.flashinfer_package import find_flashinfer
from devices.interface import Device
from engine.attention.flashinfer_paged import FlashInferAttention
from engine.attention.interface import AttentionBackend, AttentionOptions, DecodeAttention, StepAttention
from engine.attention.tables import DecodeInputs, HostTables
from engine.attention.torch_paged import TorchPagedAttention
from engine.attention.varlen import VarlenAttention
from engine.step_metadata import StepMetadata
from telemetry.logs import EventLogger

_log = EventLogger("engine")


class PagedLibrary(AttentionBackend, Protocol):
    """A library whose kernels compute the layers that it supports."""

    def takes(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> bool:  # fmt: skip
        """Return whether the library can compute this layer."""
        ...

    def plan_decode(self, inputs: DecodeInputs) -> DecodeAttention | None:
        """See GraphBackend; None where the library has no kernels for decode steps."""
        ...

    def fixed_bytes(self, rows: int, width: int) -> int:
        """See GraphBackend."""
        ...


def make_cuda_attention(device: Device) -> "CudaAttention":
    """Return the backend with the library that this machine has; its `note` gives the reason."""
    library, note = choose_library(device)
    return CudaAttention(library, note)


def choose_library(device: Device) -> tuple[PagedLibrary | None, str]:
    """Return the library, None to compute all layers by torch's plain operations, and a line for the log."""
    module, said = find_flashinfer()
    if module is None:
        return _of_torch(said)
    try:
        return FlashInferAttention(module, device), f"attention by {said}"
    except AttributeError as error:
        return _of_torch(f"{said} cannot be used: {error}")


def _of_torch(why: str) -> tuple[PagedLibrary | None, str]:
    if not torch.backends.cuda.is_flash_attention_available():
        return None, f"attention by torch: {why}, and torch is built without its flash kernel"
    try:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None, f"attention by torch: {why}, and torch {torch.__version__} has no varlen_attn"
    return VarlenAttention(kernel), f"attention by torch's flash kernel: {why}"


class CudaAttention:
    """The CUDA backend. One thread calls it."""

    def __init__(self, library: PagedLibrary | None = None, note: str = "attention by torch") -> None:
        """Layers that `library` does not support run on torch's plain operations."""
        self.library, self.note = library, note
        self.failed: str | None = None
        """Why the library was given up."""
        self.torch = TorchPagedAttention()
        self.needs_narrow = not isinstance(library, FlashInferAttention)
        """Whether some layer gathers its keys by block tables, which should then be no wider than needed."""

    @property
    def alternatives(self) -> "tuple[CudaAttention, ...]":
        """Backends to try where this one fails its check at load (trusted.py): with fewer libraries."""
        if self.library is None:
            return ()
        by_flash = CudaAttention(*_of_torch(f"{type(self.library).__name__} fails its check"))
        plain = CudaAttention(note="attention by torch")
        return (plain,) if isinstance(self.library, VarlenAttention) or by_flash.library is None else (by_flash, plain)

    def plan(self, metadata: StepMetadata) -> "CudaStep":
        """See AttentionBackend."""
        library = None if self.library is None else self.library.plan(metadata)
        return CudaStep(self, self.torch.plan(metadata), library, self.library)

    def plan_decode(self, inputs: DecodeInputs) -> "CudaDecode":
        """See GraphBackend."""
        library = None if self.library is None else self.library.plan_decode(inputs)
        return CudaDecode(self, self.torch.plan_decode(inputs), library)

    def table_widths(self, rows: int, most: int, block_size: int) -> tuple[int, ...]:
        """See GraphBackend; a library reads no more than each row needs, however wide the tables are."""
        return self.torch.table_widths(rows, most, block_size) if self.needs_narrow else (most,)

    def fixed_bytes(self, rows: int, width: int) -> int:
        """See GraphBackend; only the library has any."""
        return 0 if self.library is None else self.library.fixed_bytes(rows, width)

    def give_up(self, error: Exception) -> None:
        """Switch for good to torch's kernels after the library failed."""
        _log.warning("attention_fallback", failed=type(self.library).__name__, used="torch", error=str(error))
        self.failed = f"{type(self.library).__name__}: {error}"
        why, is_torch = f"{type(self.library).__name__} failed: {error}", isinstance(self.library, VarlenAttention)
        self.library, self.note = (None, f"attention by torch: {why}") if is_torch else _of_torch(why)
        self.needs_narrow = True


class CudaStep:
    """One step: each layer runs on the library where it supports the layer, else on torch."""

    def __init__(
        self, backend: CudaAttention, by_torch: StepAttention, by_library: StepAttention | None,
        library: PagedLibrary | None, decode: "CudaDecode | None" = None,
    ) -> None:  # fmt: skip
        """`library` planned `by_library`; the backend may have given it up since. `decode.reads_tables` is set here."""
        self._backend, self._torch, self._library = backend, by_torch, by_library
        self._planned_by, self._decode = library, decode

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write: one launch for keys and one for values."""
        self._torch.write(keys, values, new_keys, new_values)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        backend, library = self._backend, self._planned_by
        if self._library is not None and library is not None and backend.library is library:
            if library.takes(query, keys, values, options):
                try:
                    return self._library.attend(query, keys, values, options)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # noqa: BLE001 - third-party kernels may raise anything
                    backend.give_up(error)
            backend.needs_narrow = True
        if self._decode is not None:
            self._decode.reads_tables = True
        return self._torch.attend(query, keys, values, options)


class CudaDecode:
    """Implements DecodeAttention for the library and torch together."""

    def __init__(
        self, backend: CudaAttention, by_torch: DecodeAttention, by_library: DecodeAttention | None
    ) -> None:  # fmt: skip
        self._backend, self._torch, self._library = backend, by_torch, by_library
        self._planned_by = backend.library
        self.reads_tables = False

    def prepare(self, host: HostTables) -> None:
        """See DecodeAttention. Errors of the library pass through: the captured graph needs its plan."""
        if self._library is not None:
            self._library.prepare(host)

    def step(self) -> CudaStep:
        """See DecodeAttention."""
        library = None if self._library is None else self._library.step()
        self.reads_tables = self._library is not None and self._library.reads_tables
        return CudaStep(self._backend, self._torch.step(), library, self._planned_by, self)
