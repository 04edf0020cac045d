"""Check that the installed torch supports a device. `scripts/install` runs it before it installs further packages.

    python -m devices.torch_build npu 2.13.0        # the torch_npu to install; a mismatch is printed, exit status 1

Torch is not imported: the import fails with an installed torch_npu whose CANN is missing.
"""

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from devices.versions import numbers, package_version, torch_of

_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)


def cuda_of_torch() -> str | None:
    """Return the CUDA release that the installed torch was built with, None for a build without CUDA."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(next(iter(spec.submodule_search_locations)), "version.py")
    match = _CUDA.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return match[1] if match else None


def unfit(device: str, torch_npu: str) -> str | None:
    """Return why the installed torch does not fit `device`, or None; `torch_npu` is the release to install."""
    torch, cuda = package_version("torch"), cuda_of_torch()
    if torch is None:
        return "torch is not installed"
    if device == "cuda" and cuda is None:
        return f"torch {torch} is a build without CUDA: --device cuda needs PyPI's build or one of a +cu index"
    if device == "npu":
        if cuda is not None:
            return f"torch {torch} is a build for CUDA {cuda}: --device npu needs the CPU build (+cpu)"
        release = package_version("torch_npu") or torch_npu
        wanted = torch_of(release) if package_version("torch_npu") else ".".join(map(str, numbers(release)[:2]))
        if numbers(torch)[:2] != numbers(wanted):
            return f"torch {torch} does not match torch_npu {release}, which needs torch {wanted}"
    return None


def main(argv: Sequence[str]) -> int:
    """Print the reason for a mismatch and return 1, or return 0."""
    why = unfit(argv[0], argv[1] if len(argv) > 1 else "")
    if why is not None:
        sys.stdout.write(f"{why}\n")
    return 0 if why is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
