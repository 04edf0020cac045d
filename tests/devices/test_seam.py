"""Only a kind's own files distinguish kinds of devices: few others of the product name one, or call its library.

Every module of the product is parsed. The exceptions are listed below, each with its reason.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from devices.table import KINDS
from flags.options import EngineOptions

ROOT = Path(__file__).parents[2]
NAMES = ("cuda", "npu", "nccl", "hccl")
_LITERAL = re.compile(rf"(?:{'|'.join(NAMES)})(?::[0-9]*)?|torch_npu")
OWN = (
    "devices/cuda", "devices/npu",  # the file of a kind
    "engine/attention/cuda", "engine/attention/npu", "engine/cuda/", "engine/npu/",  # its kernels
    "kvtransfer/cuda_",  # a transport between GPUs
)  # fmt: skip
"""Files of one kind."""
ALLOWED = {
    "devices/table.py": "one row per kind, and the order of --device auto",
    "devices/collectives.py": "one row per process group backend, by the name that a kind's traits give",
    "devices/network.py": "one row per process group backend: the variables of its network interface",
    "devices/torch_build.py": "which build of torch each kind needs; scripts/install calls it before torch exists",
    "devices/versions.py": "the versions of driver and libraries in an error, and which do not fit",
    "flags/options.py": "the values of --device: flags cannot import devices, so a test compares them",
    "engine/attention/backends.py": "one row per backend, by the name that a kind's traits give",
    "engine/device_modules.py": "one row per kind that brings modules of its own, looked up by its traits",
} | dict.fromkeys(
    (
        "ranktable_tools/containers/base_image.py", "ranktable_tools/containers/cards.py",
        "ranktable_tools/containers/docker_run.py", "ranktable_tools/containers/image_plan.py",
        "ranktable_tools/containers/member.py", "ranktable_tools/containers/run_line.py",
        "ranktable_tools/devices/card_addresses.py", "ranktable_tools/devices/cards.py",
        "ranktable_tools/devices/kinds.py", "ranktable_tools/doctor/cards.py", "ranktable_tools/doctor/container.py",
        "ranktable_tools/doctor/device_network.py", "ranktable_tools/doctor/versions.py",
        "ranktable_tools/kube/own_devices.py",
    ),
    "tools for operators import nothing of ours, so they cannot use the interface",
)  # fmt: skip
MAX_ALLOWED = 22
"""Lower it with each file that leaves ALLOWED; it never grows."""


@dataclass(frozen=True, slots=True)
class Find:
    """A place that names a kind."""

    path: str
    line: int
    what: str


def find_kinds(path: str, text: str) -> Iterator[Find]:
    """Yield where a module compares with or looks up a kind's name, or uses its library."""
    tree = ast.parse(text, path)
    for node in ast.walk(tree):
        what = _device_literal(node)
        if what is not None:
            yield Find(path, node.lineno, what)  # type: ignore[attr-defined]


def _device_literal(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _LITERAL.fullmatch(node.value):
        return repr(node.value)
    if isinstance(node, ast.Attribute) and node.attr in NAMES and _is_name(node.value, "torch"):
        return f"torch.{node.attr}"
    if isinstance(node, ast.Attribute) and _is_name(node.value, "torch_npu"):
        return f"torch_npu.{node.attr}"
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return next((name for name in names if _is_library(name)), None)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_library(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch_npu" or (parts[0] == "torch" and len(parts) > 1 and parts[1] in NAMES)


def product_files() -> list[str]:
    """Return every module of the packages that are installed."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    roots = sorted({package.partition(".")[0] for package in packages})
    return [str(file.relative_to(ROOT)) for root in roots for file in sorted((ROOT / root).rglob("*.py"))]


def test_no_module_outside_the_seam_names_a_kind() -> None:
    files = product_files()
    found = [
        find
        for file in files
        if not file.startswith(OWN) and file not in ALLOWED and not file.endswith("_pb2.py")
        for find in find_kinds(file, (ROOT / file).read_text(encoding="utf-8"))
    ]

    assert len(files) > 400
    assert found == [], "\n".join(f"{find.path}:{find.line}: {find.what}" for find in found)


def test_the_files_that_name_kinds_only_become_fewer() -> None:
    assert len(ALLOWED) == MAX_ALLOWED


@pytest.mark.parametrize("path", ALLOWED)
def test_every_allowed_use_exists_and_is_needed(path: str) -> None:
    assert list(find_kinds(path, (ROOT / path).read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "planted",
    [
        'if device == "cuda":\n    pass',
        'if tensor.device.type in ("npu", "cpu"):\n    pass',
        "match kind:\n    case 'hccl':\n        pass",
        'table = {"nccl": 1}',
        'torch.device("cuda:0")',
        'torch.device("npu:")',
        "torch.cuda.synchronize()",
        "with torch.npu.stream(s):\n    pass",
        "import torch_npu",
        "import torch.cuda",
        "from torch import cuda",
        "from torch_npu.npu import graphs",
        'importlib.import_module("torch_npu")',
        "torch_npu.npu_rms_norm(x, g)",
        'getattr(torch, "npu")',
    ],
)
def test_the_check_finds_a_use_in_a_sample(planted: str) -> None:
    assert list(find_kinds("planted.py", planted))


@pytest.mark.parametrize(
    "innocent",
    ['"""A note on cuda and npu."""', "help='an NPU, else a GPU (cuda)'", "device.synchronize()", "x.npu = 1"],
)
def test_the_check_ignores_texts_for_people(innocent: str) -> None:
    assert not list(find_kinds("innocent.py", innocent))


def test_the_choices_of_the_flags_are_the_kinds_of_the_table() -> None:
    fields = EngineOptions.__dataclass_fields__
    attentions = {kind.traits.attention for kind in KINDS.values()}

    assert set(fields["device"].metadata["choices"]) == {"auto", *KINDS}
    assert set(fields["attention_backend"].metadata["choices"]) == {"auto", "reference", *attentions}
