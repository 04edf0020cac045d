"""The torch_npu wheel as data: downloaded once, unzipped into pdserve's cache folder, and never installed.

Installed, it would break `import torch` on every machine without CANN. What tests take from it is text: the schemas of
its ops, its meta kernels and other Python sources.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from pdserve.run_folder import default_cache_dir

OLDEST = "2.10.0.post4"
"""The first that is supported, as it was last built."""
VERSION = os.environ.get("PDSERVE_TEST_TORCH_NPU", "2.13.0")
"""By default that of the torch that is tested."""
_PIP_SECONDS = 90
_FOLDERS = ("torch_npu/npu/", "torch_npu/op_plugin/", "torch_npu/utils/", "torch_npu/distributed/")
_OPS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


class NoWheel(Exception):
    """Why the wheel cannot be had here."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """An unzipped wheel; only what `_wanted` says is there."""

    root: Path

    def source(self, path: str) -> str:
        """Return the text of a file, as "torch_npu/npu/graphs.py"."""
        return (self.root / path).read_text(encoding="utf-8")

    def schemas(self) -> list[str]:
        """Return the schemas of custom ops, as "npu_swiglu(Tensor self, int dim=-1) -> Tensor".

        Without three of old wheels: today's torch has no names of dimensions to parse them by.
        """
        ops: dict[str, Any] = yaml.load(self.source(_OPS), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return [entry["func"] for entry in ops["custom"] if "Dimname" not in entry["func"]]


@cache
def find_wheel() -> Wheel:
    """Return the wheel; the first call of a machine downloads 44 MB. Raises NoWheel."""
    return wheel_in(default_cache_dir(os.environ) / "torch-npu", os.environ)


def wheel_in(folder: Path, environ: Mapping[str, str], version: str = VERSION) -> Wheel:
    """Return the wheel unzipped below `folder`, downloading it where it is not there. Raises NoWheel."""
    root = folder / version
    if root.is_dir():
        return Wheel(root)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if not root.is_dir():  # by the one that had the lock
            _make(root, environ)
    return Wheel(root)


def _make(root: Path, environ: Mapping[str, str]) -> None:
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=root.parent))
    try:
        whole = _download(draft, environ, root.name)
        unzipped = draft / "unzipped"
        with zipfile.ZipFile(whole) as archive:
            archive.extractall(unzipped, [name for name in archive.namelist() if _wanted(name)])
        unzipped.replace(root)
    finally:
        shutil.rmtree(draft)


def _download(folder: Path, environ: Mapping[str, str], version: str) -> Path:
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps",
        "--only-binary=:all:", "--retries=1", "--timeout=20", "--dest", str(folder), f"torch-npu=={version}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, env=dict(environ))
    except subprocess.TimeoutExpired as error:
        raise NoWheel(f"pip download torch-npu=={version} took longer than {_PIP_SECONDS} s") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise NoWheel(f"pip download torch-npu=={version} failed: {' '.join(last)}")
    return next(folder.glob("*.whl"))


def _wanted(name: str) -> bool:
    path = PurePosixPath(name)
    if name == _OPS or name.endswith(".dist-info/METADATA"):
        return True
    return path.suffix == ".py" and (name.startswith(_FOLDERS) or path.parent == PurePosixPath("torch_npu"))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock: of several workers one downloads."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
