"""A venv for a client that goes with other releases than the tests, or changes how pytest runs."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.run_folder import default_cache_dir


def own_venv(name: str) -> Path:
    """Return the interpreter of a venv with the pins of venvs/NAME.txt, which the cache folder keeps."""
    pins = Path(__file__).with_name("venvs") / f"{name}.txt"
    digest = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()
    folder = default_cache_dir(os.environ) / "test-venvs" / f"{name}-{digest[:16]}"
    python, mark = folder / "bin" / "python", folder / "complete"
    if not mark.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(pins))
        mark.touch()
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        pytest.skip(f"missing tool: {' '.join(command)} failed: {done.stderr[-2000:]}")
