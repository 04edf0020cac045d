"""Which modules a process that waits to become an instance has imported, and that it waits for native libraries."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from instance import warm_up
from native.background import Build
from native.builder import Found
from tests.engine.tiny_models import make_tiny_model

_ROOT = Path(__file__).parents[2]
_LOADS = """
import sys
from pathlib import Path
from instance.warm_up import import_all
from flags.options import EngineOptions

path = sys.argv[1]
import_all(EngineOptions(model=path))
warm = set(sys.modules)
from engine.loader import load_model
load_model(Path(path), dtype="float32", block_size=16, kv_cache_memory=1 << 20, num_threads=1)
late = {name.partition(".")[0] for name in set(sys.modules) - warm}
print(sorted(late & {"torch", "transformers", "numpy", "safetensors", "tokenizers", "engine"}))
"""


@pytest.mark.long
def test_a_load_after_the_warm_up_imports_no_module(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "llama")
    command = [sys.executable, "-P", "-c", _LOADS, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=_ROOT, check=True)

    assert done.stdout == "[]\n"


class _Build:
    def __init__(self, waited: list[str]) -> None:
        self._waited = waited

    def wait(self, timeout_s: float) -> bool:
        self._waited.append("build")
        return True


def test_the_warm_up_waits_for_a_library_that_is_being_built(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    build: Build = _Build(waited)  # type: ignore[assignment]
    by_another: Found[object] = Found(None, "another process is building it", True)
    finds: Iterator[Found[object]] = iter([Found(None, "", True, build), by_another, *[Found(object())] * 2])
    monkeypatch.setattr(warm_up, "find_library", lambda recipe, environ: next(finds))
    monkeypatch.setattr("instance.warm_up.time.sleep", lambda seconds: waited.append("other"))

    warm_up._wait_for_libraries()

    assert waited == ["build", "other"]
    assert next(finds, None) is None
