"""Attention on GPUs: each layer by the first library that supports it, else by torch's plain operations.

choose_libraries --those of this machine, best first, and a line for the log--> CudaAttention
library               | head dims             | keys                    | graphs
FlashInfer            | 64, 128, 256          | in place                | yes
FlashAttention 3      | multiples of 8 to 256 | in place                | yes
torch's flash kernel  | multiples of 8 to 256 | gathered, one call      | no
torch_paged.py        | any                   | gathered, several calls | yes
"""

import importlib
import importlib.util
from collections.abc import Container, Sequence
from typing import Protocol, runtime_checkable

import torch

from devices.flashinfer_package import find_flashinfer
from devices.interface import Device
from devices.versions import package_version
from engine.attention import flash3_paged
from engine.attention.block_tables import DecodeInputs, HostTables, TableUse
from engine.attention.flash3_paged import Flash3Attention
from engine.attention.flashinfer_paged import FlashInferAttention
from engine.attention.interface import AttentionBackend, AttentionOptions, DecodeAttention, StepAttention
from engine.attention.torch_paged import TorchPagedAttention, doubled_widths
from engine.attention.varlen import VarlenAttention
from engine.step_metadata import StepMetadata
from telemetry.logs import EventLogger

_log = EventLogger("engine")
_DTYPES = (torch.float16, torch.bfloat16)


class PagedLibrary(AttentionBackend, Protocol):
    """A library whose kernels compute layers in 16 bits with one head dim for keys and values."""

    name: str
    tables: TableUse
    """How decode steps in graphs use the block tables."""

    @property
    def dims(self) -> Container[int]:
        """The head dims that it supports."""
        ...

    @property
    def has_softcap(self) -> bool:
        """Whether it supports layers with a soft cap."""
        ...


@runtime_checkable
class GraphLibrary(PagedLibrary, Protocol):
    """A library whose decode steps graphs can replay."""

    def plan_decode(self, inputs: DecodeInputs) -> DecodeAttention:
        """See GraphBackend."""
        ...

    def fixed_bytes(self, rows: int, width: int) -> int:
        """See GraphBackend."""
        ...


def make_cuda_attention(device: Device) -> "CudaAttention":
    """Return the backend with the libraries that this machine has; its `note` is the line for the log."""
    return CudaAttention(*choose_libraries(device))


def choose_libraries(device: Device) -> tuple[tuple[PagedLibrary, ...], str]:
    """Return the libraries, best first, and a line for the log."""
    found, missing = list[PagedLibrary](), list[str]()
    for find in (_flashinfer, _flash_attn_3, _torch_flash):
        library = find(device)
        if isinstance(library, str):
            missing.append(library)
        elif library is not None:
            found.append(library)
    return tuple(found), _log_line(found, ", ".join(missing))


def _log_line(libraries: Sequence[PagedLibrary], why: str) -> str:
    """Return the line for the log; `why` is the reason why there are no more libraries, if there is one."""
    names = ", else by ".join(library.name for library in libraries) or "torch"
    return f"attention by {names}" + (f": {why}" if why else "")


def _flashinfer(device: Device) -> PagedLibrary | str:
    module, version_or_reason = find_flashinfer()
    if module is None:
        return version_or_reason
    try:
        return FlashInferAttention(module, device, version_or_reason)
    except AttributeError as error:
        return f"{version_or_reason} cannot be used: {error}"


def _flash_attn_3(device: Device) -> PagedLibrary | str | None:
    """Return None, and so no note, where the library is not installed or is for other GPUs."""
    package, module = flash3_paged.PACKAGE, flash3_paged.MODULE
    if importlib.util.find_spec(module) is None:
        return None
    if torch.cuda.get_device_capability(device.torch_device)[0] != flash3_paged.CAPABILITY:
        return None
    try:
        kernel = importlib.import_module(module).flash_attn_with_kvcache
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{package} cannot be used: {error}"
    return Flash3Attention(kernel, f"{package} {package_version(package) or 'of unknown version'}")


def _torch_flash(device: Device) -> PagedLibrary | str:
    if not torch.backends.cuda.is_flash_attention_available():
        return "torch is built without its flash kernel"
    try:
        return VarlenAttention(importlib.import_module("torch.nn.attention.varlen").varlen_attn)
    except (ImportError, AttributeError):
        return f"torch {torch.__version__} has no varlen_attn"


class CudaAttention:
    """The CUDA backend. One thread calls it."""

    def __init__(self, libraries: Sequence[PagedLibrary] = (), note: str = "attention by torch") -> None:
        """Layers that no library supports run on torch's plain operations."""
        self.libraries, self.note = tuple(libraries), note
        self.failed: str | None = None
        """Why a library is no longer used."""
        self.torch = TorchPagedAttention()
        self.tables = TableUse.NONE if any(isinstance(one, GraphLibrary) for one in libraries) else TableUse.GATHER
        """The highest TableUse of any layer so far."""

    @property
    def alternatives(self) -> "tuple[CudaAttention, ...]":
        """Backends to try where this one fails its check at load (backend_choice.py): each has one library fewer."""
        made, rest = list[CudaAttention](), self.libraries
        while rest:
            failed, rest = type(rest[0]).__name__, rest[1:]
            made.append(CudaAttention(rest, _log_line(rest, f"{failed} fails its check")))
        return tuple(made)

    def plan(self, metadata: StepMetadata) -> "CudaStep":
        """See AttentionBackend."""
        planned = [(library, library.plan(metadata)) for library in self.libraries]
        return CudaStep(self, self.torch.plan(metadata), planned)

    def plan_decode(self, inputs: DecodeInputs) -> "CudaDecode":
        """See GraphBackend."""
        return CudaDecode(self, inputs)

    def table_widths(self, rows: int, max_blocks: int, block_size: int) -> tuple[int, ...]:
        """See GraphBackend."""
        if self.tables is TableUse.GATHER:
            return self.torch.table_widths(rows, max_blocks, block_size)
        return (max_blocks,) if self.tables is TableUse.NONE else doubled_widths(rows, max_blocks, block_size)

    def fixed_bytes(self, rows: int, width: int) -> int:
        """See GraphBackend; only libraries keep such memory."""
        return sum(one.fixed_bytes(rows, width) for one in self.libraries if isinstance(one, GraphLibrary))

    def give_up(self, library: PagedLibrary, error: Exception) -> None:
        """Stop using a library that has failed."""
        self.libraries = tuple(one for one in self.libraries if one is not library)
        self.failed = f"{type(library).__name__}: {error}"
        used = self.libraries[0].name if self.libraries else "torch"
        _log.warning("attention_fallback", failed=type(library).__name__, used=used, error=str(error))
        self.note = _log_line(self.libraries, f"{type(library).__name__} failed: {error}")
        self.tables = TableUse.GATHER


class CudaStep:
    """One step: each layer runs on the first library that supports it, else on torch."""

    def __init__(
        self, backend: CudaAttention, by_torch: StepAttention, planned: Sequence[tuple[PagedLibrary, StepAttention]],
        decode: "CudaDecode | None" = None,
    ) -> None:  # fmt: skip
        """The backend may stop using a library after this step is planned. `decode.reads_tables` is set here."""
        self._backend, self._torch, self._planned, self._decode = backend, by_torch, planned, decode

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write: one launch for keys and one for values."""
        self._torch.write(keys, values, new_keys, new_values)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        for library, step in self._planned:
            if library not in self._backend.libraries or not _supports(library, query, keys, values, options):
                continue
            try:
                out = step.attend(query, keys, values, options)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - third-party kernels may raise anything
                self._backend.give_up(library, error)
                continue
            self._note_tables(library.tables)
            return out
        self._note_tables(TableUse.GATHER)
        return self._torch.attend(query, keys, values, options)

    def _note_tables(self, tables: TableUse) -> None:
        self._backend.tables = max(self._backend.tables, tables)
        if self._decode is not None and tables is not TableUse.NONE:
            self._decode.reads_tables = True


def _supports(
    library: PagedLibrary, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
) -> bool:
    """Return whether a library can compute this layer."""
    is_alike = query.dtype == keys.dtype == values.dtype and keys.shape[-1] == values.shape[-1]
    is_supported = query.dtype in _DTYPES and keys.shape[-1] in library.dims
    return is_alike and is_supported and (options.softcap is None or library.has_softcap)


class CudaDecode:
    """Implements DecodeAttention for the libraries and torch together."""

    def __init__(self, backend: CudaAttention, inputs: DecodeInputs) -> None:
        self._backend, self._torch = backend, backend.torch.plan_decode(inputs)
        self._planned = [
            (library, library.plan_decode(inputs)) for library in backend.libraries if isinstance(library, GraphLibrary)
        ]
        self.reads_tables = False

    def prepare(self, host: HostTables) -> None:
        """See DecodeAttention. Errors of a library pass through: the captured graph needs the library's plan."""
        for _, decode in self._planned:
            decode.prepare(host)

    def step(self) -> CudaStep:
        """See DecodeAttention."""
        self.reads_tables = False
        planned = [(library, decode.step()) for library, decode in self._planned]
        return CudaStep(self._backend, self._torch.step(), planned, self)
