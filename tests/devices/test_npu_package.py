"""A torch_npu without CANN is hidden until an NPU is selected."""

import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devices import npu_package
from devices.npu import NpuKind


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch_npu that cannot be imported."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so is missing')\n")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    npu_package.show()
    sys.modules.pop("torch_npu", None)


def is_found() -> bool:
    return importlib.util.find_spec("torch_npu") is not None


@pytest.mark.usefixtures("installed")
def test_torch_npu_is_hidden_without_cann_unless_it_is_selected() -> None:
    assert is_found()
    npu_package.hide_without_cann()
    assert not is_found()
    with pytest.raises(ImportError):
        importlib.import_module("torch_npu")
    assert npu_package.show()
    assert is_found()


@pytest.mark.usefixtures("installed")
def test_torch_npu_is_hidden_only_when_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("torch", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = list(sys.meta_path)

    npu_package.hide_before_torch()
    npu_package.hide_before_torch()
    assert len(sys.meta_path) == len(before) + 1
    assert is_found()
    assert importlib.util.find_spec("torch") is not None

    assert not is_found()
    assert sys.meta_path == before


@pytest.mark.usefixtures("installed")
def test_torch_npu_is_hidden_at_once_if_torch_is_imported() -> None:
    importlib.import_module("torch")

    npu_package.hide_before_torch()

    assert not is_found()


@pytest.mark.usefixtures("installed")
def test_torch_npu_stays_visible_with_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)

    npu_package.hide_without_cann()

    assert is_found()


@pytest.mark.usefixtures("installed")
def test_missing_npu_parts_are_named_and_the_package_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devices.versions.npu_mismatch", lambda found: None)
    npu_package.hide_without_cann()

    why = NpuKind().lacking()

    assert why is not None
    assert why.startswith(
        "torch_npu 2.13.0 cannot be imported; CANN is missing or does not match: libhccl.so is missing ("
    )
    assert not is_found()


def test_without_torch_npu_nothing_is_hidden() -> None:
    if is_found():
        pytest.skip("torch_npu is installed here")
    npu_package.hide_without_cann()

    assert "torch_npu" not in sys.modules
    assert not npu_package.show()
