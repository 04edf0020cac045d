"""--device npu: which torch_npu is accepted, and the message for one that is not."""

import importlib.metadata
import importlib.util
import sys
import types
from typing import Any

import pytest

from devices import versions
from devices.npu import MIN_VERSION, NpuKind
from tests.npu.ops import NpuOps
from wire.errors import ConfigError


def installed(monkeypatch: pytest.MonkeyPatch, version: str, **attributes: Any) -> None:
    """Install a stand-in for torch_npu of this version."""
    module = types.ModuleType("torch_npu")
    module.__spec__ = importlib.util.spec_from_loader("torch_npu", None)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "torch_npu" else real(name))
    monkeypatch.setattr(versions, "npu_mismatch", lambda found: None)


@pytest.mark.parametrize("version", ["2.7.1.post1", "2.8.0", "2.9.1"])
def test_an_old_torch_npu_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, version)

    assert NpuKind().lacking() == f"torch_npu {version} is too old: 2.10 or newer is needed"
    with pytest.raises(ConfigError, match=f"--device npu: torch_npu {version} is too old"):
        NpuKind().open()


@pytest.mark.parametrize("version", ["2.10.0.post4", "2.13.0", "3.0.0rc1"])
def test_a_new_torch_npu_lists_its_cards(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, version, npu=types.SimpleNamespace(is_available=lambda: False))
    assert str(NpuKind().lacking()).startswith(f"torch_npu {version} sees no NPU")

    installed(monkeypatch, version, npu=types.SimpleNamespace(is_available=lambda: True))
    assert NpuKind().lacking() is None


def test_the_minimum_version_is_the_first_with_a_cache_mode(npu_ops: NpuOps) -> None:
    arguments = {argument.name for argument in npu_ops.schemas["npu_scatter_pa_kv_cache"].arguments}

    assert MIN_VERSION == (2, 10)
    assert "cache_mode" in arguments
