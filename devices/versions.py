"""The versions of driver, CUDA or CANN, torch and torch_npu on this machine, and whether they fit together.

`cuda_mismatch` and `npu_mismatch` return why the versions do not fit, followed by the versions found, such as
"(driver 570.86, CUDA 13.0, torch 2.13.0+cu130)".

Read from files and from packages' metadata: no tool is run, torch_npu is not imported.
"""

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

MIN_CANN: Final = "9.0"
"""The CANN release for which torch_npu 2.10 was built; older releases of torch_npu lack ops that we call."""
MIN_DRIVER: Final[Mapping[int, str]] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest Linux driver per major release of CUDA: NVIDIA's table of minor version compatibility."""
_NVIDIA_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+([0-9][0-9.]*)")
_CANN_HOMES = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")
_CANN_FILES = (
    ("ascend_toolkit_install.info", re.compile(r"^version\s*=\s*(\S+)", re.MULTILINE)),
    (f"{platform.machine()}-linux/ascend_toolkit_install.info", re.compile(r"^version\s*=\s*(\S+)", re.MULTILINE)),
    ("runtime/version.info", re.compile(r"^version_dir\s*=\s*(\S+)", re.MULTILINE)),
)
_ASCEND_DRIVER = re.compile(r"^version\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)
_KERNEL_PACKAGES = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "flash-attn-3", "triton")
_REQUIRED_TORCH = re.compile(r"^torch\s*\(?==\s*([0-9]+\.[0-9]+)")


def package_version(name: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for "2.13.0+cpu", (9, 1) for "9.1.RC1"."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def cuda_versions(cuda: str | None, root: Path = Path("/")) -> dict[str, str]:
    """Return the versions found in torch's software stack on GPUs; `cuda` is torch.version.cuda."""
    driver = _first(_NVIDIA_DRIVER, root / "proc/driver/nvidia/version")
    return _known({"driver": driver, "CUDA": cuda, "torch": package_version("torch")})


def npu_versions(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> dict[str, str]:
    """Return the versions found in torch's software stack on NPUs."""
    packages = {name: package_version(name) for name in ("torch", "torch_npu")}
    driver = _first(_ASCEND_DRIVER, root / "usr/local/Ascend/driver/version.info")
    return _known(
        {"driver": driver, "CANN": _cann_version(os.environ if environ is None else environ, root), **packages}
    )


def kernel_versions() -> dict[str, str]:
    """Return the versions of all software on this machine that contains kernels, for any device."""
    libraries = {name: package_version(name) for name in _KERNEL_PACKAGES}
    return _known({**libraries, **cuda_versions(None), **npu_versions()})


def cuda_mismatch(found: Mapping[str, str]) -> str | None:
    """Return why these cannot work together, or None."""
    driver, cuda = found.get("driver"), found.get("CUDA")
    if cuda is None:
        return f"torch is built without CUDA: run scripts/install --device cuda ({format_versions(found)})"
    if driver is None:
        return f"no NVIDIA driver is loaded here: /proc/driver/nvidia/version is missing ({format_versions(found)})"
    minimum = MIN_DRIVER.get(numbers(cuda)[0])
    if minimum is not None and numbers(driver) < numbers(minimum):
        return (
            f"driver {driver} is too old for CUDA {cuda}, which needs {minimum}: update it, or install a torch for "
            f"an older CUDA ({format_versions(found)})"
        )
    return None


def npu_mismatch(found: Mapping[str, str]) -> str | None:
    """Return why these cannot work together, or None."""
    torch, torch_npu, cann = found.get("torch"), found.get("torch_npu"), found.get("CANN")
    if torch is None or torch_npu is None:
        return f"torch and torch_npu are both needed ({format_versions(found)})"
    wanted = torch_of(torch_npu)
    if numbers(torch)[:2] != numbers(wanted):
        shown = format_versions(found)
        return f"torch_npu {torch_npu} is for torch {wanted}, not {torch}: install a matching pair ({shown})"
    if "+cu" in torch:
        return f"torch {torch} is a CUDA build, but torch_npu needs the CPU build (+cpu) ({format_versions(found)})"
    if cann is not None and numbers(cann)[:2] < numbers(MIN_CANN):
        return f"CANN {cann} is too old: {MIN_CANN} or later is needed ({format_versions(found)})"
    return None


def torch_of(torch_npu: str) -> str:
    """Return the minor release of torch that torch_npu's metadata requires, else `torch_npu`'s own minor release."""
    try:
        requires = importlib.metadata.requires("torch_npu") or ()
    except importlib.metadata.PackageNotFoundError:
        requires = ()
    required = next((match[1] for text in requires if (match := _REQUIRED_TORCH.match(text))), None)
    return required or ".".join(map(str, numbers(torch_npu)[:2]))


def format_versions(found: Mapping[str, str]) -> str:
    """Return the versions as text: "driver 570.86, CUDA 13.0, torch 2.13.0"."""
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _known(found: Mapping[str, str | None]) -> dict[str, str]:
    return {name: version for name, version in found.items() if version is not None}


def _cann_version(environ: Mapping[str, str], root: Path) -> str | None:
    named = environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME")
    homes = [Path(named)] if named else [root / home for home in _CANN_HOMES]
    tries = (_first(pattern, home / file) for home in homes for file, pattern in _CANN_FILES)
    return next((version for version in tries if version is not None), None)


def _first(pattern: re.Pattern[str], file: Path) -> str | None:
    try:
        match = pattern.search(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None
