"""Version mismatches: one line with all versions found, read from files like the drivers' own."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from devices import versions
from devices.cuda import CudaKind

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root@host)  Thu Jan 9\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  450.80.02  Wed Sep 23 01:13:39 UTC 2020\nGCC version: 9.3\n"
HEAD = "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0.post2\n"
FITTING: dict[str, str | None] = {"driver": "25.0.rc1", "CANN": "9.1.0", "torch": "2.13.0+cpu", "torch_npu": "2.13.0"}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def assert_one_line(why: str | None, message: str | None) -> None:
    """Assert that it is one line with these texts, or None where none are expected."""
    if message is None or why is None:
        assert why is message
        return
    assert message in why
    assert "\n" not in why


@pytest.mark.parametrize(("text", "driver"), [(OPEN, "570.86.15"), (CLOSED, "450.80.02"), ("else\n", None)])
def test_the_gpu_driver_version_is_read_from_the_kernel(text: str, driver: str | None, tmp_path: Path) -> None:
    write(tmp_path / "proc/driver/nvidia/version", text)

    found = versions.cuda_versions("12.8", tmp_path)

    assert found.get("driver") == driver
    assert found["CUDA"] == "12.8"
    assert found["torch"].startswith("2.")


@pytest.mark.parametrize(
    "file", ["usr/local/Ascend/ascend-toolkit/latest/ascend_toolkit_install.info", "home/cann/runtime/version.info"]
)
def test_npu_driver_and_cann_versions_are_read(file: str, tmp_path: Path) -> None:
    write(
        tmp_path / "usr/local/Ascend/driver/version.info",
        "package_version=25.2\nVersion=25.0.rc1.1\ninnerversion=V100\n",
    )
    write(tmp_path / file, "package_name=Ascend-cann-toolkit\nversion=9.1.0\nversion_dir=9.1.0\n")
    environ = {"ASCEND_HOME_PATH": str(tmp_path / "home/cann")} if file.startswith("home") else {}

    found = versions.npu_versions(environ, tmp_path)

    assert (found["driver"], found["CANN"]) == ("25.0.rc1.1", "9.1.0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"CANN": None}, None),  # a container may have it elsewhere: its import decides
        ({"torch": "2.14.0+cpu"}, "torch_npu 2.13.0 is for torch 2.13, not 2.14.0+cpu: install a matching pair"),
        ({"torch": "2.1.0"}, "is for torch 2.13, not 2.1.0"),
        ({"torch": "2.13.0+cu130"}, r"torch 2.13.0+cu130 is a CUDA build, but torch_npu needs the CPU build (+cpu)"),
        ({"CANN": "8.5.1"}, "CANN 8.5.1 is too old: 9.0 or later is needed"),
        ({"CANN": "8.0.RC1"}, "CANN 8.0.RC1 is too old"),
        ({"torch_npu": None}, "torch and torch_npu are both needed"),
    ],
)
def test_an_npu_mismatch_is_one_line_with_all_versions(changes: Mapping[str, str | None], message: str | None) -> None:
    found = {name: version for name, version in {**FITTING, **changes}.items() if version is not None}

    why = versions.npu_mismatch(found)

    assert_one_line(why, message)
    assert why is None or all(f"{name} {version}" in why for name, version in found.items())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"driver": "580.65.06", "CUDA": "13.0", "torch": "2.13.0+cu130"}, None),
        ({"driver": "535.104.05", "CUDA": "12.8", "torch": "2.13.0+cu128"}, None),
        (
            {"driver": "535.104.05", "CUDA": "13.0", "torch": "2.13.0+cu130"},
            "driver 535.104.05 is too old for CUDA 13.0, which needs 580.65.06: update it, or install a torch for an "
            "older CUDA (driver 535.104.05, CUDA 13.0, torch 2.13.0+cu130)",
        ),
        ({"CUDA": "13.0", "torch": "2.13.0"}, "no NVIDIA driver is loaded here"),
        (
            {"driver": "580.65.06", "torch": "2.13.0+cpu"},
            "torch is built without CUDA: run scripts/install --device cuda (driver 580.65.06, ",
        ),
        ({"driver": "1", "CUDA": "99.0", "torch": "2.99"}, None),  # a release that is not in the table yet
    ],
)  # fmt: skip
def test_a_gpu_mismatch_is_one_line_with_all_versions(found: Mapping[str, str], message: str | None) -> None:
    assert_one_line(versions.cuda_mismatch(found), message)


def test_a_cuda_torch_without_a_gpu_names_driver_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("devices.cuda.cuda_of_torch", lambda: "13.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(versions, "_first", lambda *_: "535.104.05")

    assert CudaKind().lacking() == versions.cuda_mismatch(versions.cuda_versions("13.0"))
    assert "driver 535.104.05 is too old for CUDA 13.0" in (CudaKind().lacking() or "")


def test_a_torch_without_cuda_and_no_card_are_known_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devices.cuda.cuda_of_torch", lambda: None)
    monkeypatch.setattr(CudaKind, "sees_card", lambda kind: False)
    monkeypatch.setitem(sys.modules, "torch", None)

    assert "torch is built without CUDA" in (CudaKind().lacking() or "")


def test_torch_npu_names_its_torch_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torch_npu-2.13.0.post2.dist-info"
    write(folder / "METADATA", HEAD + "Requires-Dist: numpy\nRequires-Dist: torch==2.12.*\n")
    assert versions.torch_of("2.13.0.post2") == "2.13"

    monkeypatch.syspath_prepend(tmp_path)

    assert versions.package_version("torch_npu") == "2.13.0.post2"
    assert versions.torch_of("2.13.0.post2") == "2.12"
