"""The torch_npu wheel as data (tests/data_wheel.py).

Installed, it would break `import torch` on every machine without CANN. What tests take from it is text: the schemas of
its ops, its meta kernels and other Python sources.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from pdserve.run_folder import default_cache_dir
from tests import data_wheel
from tests.data_wheel import NoWheel as NoWheel

OLDEST = "2.10.0.post4"
"""The oldest supported release, in its last build."""
VERSION = os.environ.get("PDSERVE_TEST_TORCH_NPU", "2.13.0")
"""The default release, which matches the tested torch."""
_FOLDERS = ("torch_npu/npu/", "torch_npu/op_plugin/", "torch_npu/utils/", "torch_npu/distributed/")
GROUPS = "torch_npu/include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp"
_OPS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


@dataclass(frozen=True, slots=True)
class Wheel:
    """An unzipped wheel; only the files that `_is_wanted` selects are there."""

    root: Path

    def source(self, path: str) -> str:
        """Return the text of a file such as "torch_npu/npu/graphs.py"."""
        return (self.root / path).read_text(encoding="utf-8")

    def schemas(self) -> list[str]:
        """Return the schemas of custom ops, such as "npu_swiglu(Tensor self, int dim=-1) -> Tensor".

        Three schemas of old wheels are left out: today's torch cannot parse their named dimensions.
        """
        ops: dict[str, Any] = yaml.load(self.source(_OPS), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return [entry["func"] for entry in ops["custom"] if "Dimname" not in entry["func"]]


@cache
def find_wheel() -> Wheel:
    """Return the wheel; the first call of a machine downloads 44 MB. Raises NoWheel."""
    return wheel_in(cache_folder(), os.environ)


def cache_folder() -> Path:
    """Return the folder of the unzipped wheels; its name changes with what `_is_wanted` selects."""
    return default_cache_dir(os.environ) / "torch-npu-2"


def wheel_in(folder: Path, environ: Mapping[str, str], version: str = VERSION) -> Wheel:
    """Return the wheel unzipped below `folder`, downloading it where it is not there. Raises NoWheel."""
    return Wheel(data_wheel.wheel_in(folder, environ, "torch-npu", version, _is_wanted))


def _is_wanted(name: str) -> bool:
    path = PurePosixPath(name)
    if name in (_OPS, GROUPS) or name.endswith(".dist-info/METADATA"):
        return True
    return path.suffix == ".py" and (name.startswith(_FOLDERS) or path.parent == PurePosixPath("torch_npu"))
