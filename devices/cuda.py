"""NVIDIA GPUs by torch.cuda."""

from devices import versions
from devices.interface import Traits
from devices.nodes import has_node
from devices.torch_device import TorchDevice
from wire.errors import ConfigError

TRAITS = Traits(
    kind="cuda", visible_variable="CUDA_VISIBLE_DEVICES", collective="nccl", block_size=16, prefill_chunk_size=2048,
    pool_alignment=512, attention="cuda", kept_linears=("int4pack", "int8"),
)  # fmt: skip


class CudaKind:
    """Implements DeviceKind."""

    traits = TRAITS

    def sees_card(self) -> bool:
        """A GPU's node is in /dev; below WSL the only one is dxg."""
        return has_node(r"nvidia[0-9]+") or has_node("dxg")

    def lacking(self) -> str | None:
        """See DeviceKind."""
        import torch

        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA: install one that has it (pdserve[cuda])"
        if torch.cuda.is_available():
            return None
        found = versions.cuda_versions(torch.version.cuda)
        return versions.cuda_mismatch(found) or f"torch {torch.__version__} sees no GPU ({versions.in_words(found)})"

    def open(self, index: int = 0) -> "CudaDevice":
        """See DeviceKind."""
        lacking = self.lacking()
        if lacking is not None:
            raise ConfigError(f"--device cuda: {lacking}")
        return CudaDevice(TRAITS, index)


class CudaDevice(TorchDevice):
    """Implements Device."""

    def describe(self) -> str:
        """The card, its memory, and the versions of torch and CUDA."""
        import torch

        return f"{super().describe()}, CUDA {torch.version.cuda}"
