"""Run one file of vLLM's tests in a process of its own, and return what each test did."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.vllm_server_tests.plugin_variables import LEFT_OUT, MODELS, RESULTS, WAY

_PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "tests.vllm_server_tests.plugin")
_ROOT = Path(__file__).parents[2]
_INI = Path(__file__).with_suffix(".ini")


@dataclass(frozen=True, slots=True)
class Result:
    """What one test did: passed, failed, skipped or left out, and why."""

    name: str
    outcome: str
    message: str


def run_file(
    tests: Path, file: str, way: str, models: Mapping[str, str], left_out: Sequence[str], chosen: Sequence[str] = ()
) -> list[Result]:
    """Run `file` of `tests/entrypoints`; return the results in the order of the tests."""
    with tempfile.TemporaryDirectory(prefix="server-tests-") as folder:
        results = Path(folder) / "results"
        results.touch()
        command = [
            sys.executable, "-P", "-m", "pytest", f"--config-file={_INI}", f"--rootdir={tests}",
            *(word for name in _PLUGINS for word in ("-p", name)), str(tests / "tests" / "entrypoints" / file), *chosen,
        ]  # fmt: skip
        # Each server has several processes, which would compile what they import.
        environ = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPATH": f"{_ROOT}{os.pathsep}{tests}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "CI": "1",  # hypothesis then takes the same examples each time
            RESULTS: str(results),
            LEFT_OUT: json.dumps(list(left_out)),
            MODELS: json.dumps(dict(models)),
            WAY: way,
        }
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        found = [Result(**json.loads(line)) for line in results.read_text().splitlines()]
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{file}: pytest's exit status is {done.returncode}\n{done.stdout}\n{done.stderr}")
    return found
