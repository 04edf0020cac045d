"""Restarts and their phases in /metrics, from the state file of `pdserve up`."""

from dataclasses import asdict
from pathlib import Path

import pytest

from pdserve.replacement import Phase
from pdserve.run_folder import ClusterState, ProcessRecord, RunFolder
from pdserve.variables import STATE_FILE
from scheduler.observability.metrics import Metrics
from scheduler.observability.replacements import VARIABLE


def _lines(state: Path | None) -> list[str]:
    page = Metrics(state_file=state).render().decode().splitlines()
    return [line for line in page if line.startswith(("pdserve_restarts", "pdserve_replacement"))]


def test_restarts_and_phases_are_read_from_ups_file(tmp_path: Path) -> None:
    phases = (Phase("process", 0.8, 0.2), Phase("weights", 1.2, 1.1))
    dead = ProcessRecord("decode-0", "decode", 7, 1, "x:1", "log", restarts=2, phases=phases, from_spare=True)
    calm = ProcessRecord("scheduler", "scheduler", 8, 1, "x:2", "log")
    folder = RunFolder(tmp_path)
    folder.write(ClusterState("http://x", "m", (dead, calm)))

    assert _lines(folder.state) == [
        'pdserve_restarts_total{name="decode-0"} 2.0',
        'pdserve_restarts_total{name="scheduler"} 0.0',
        'pdserve_replacement_seconds{name="decode-0",phase="process"} 0.8',
        'pdserve_replacement_seconds{name="decode-0",phase="weights"} 1.2',
        'pdserve_replacement_cpu_seconds{name="decode-0",phase="process"} 0.2',
        'pdserve_replacement_cpu_seconds{name="decode-0",phase="weights"} 1.1',
    ]
    read = folder.read()
    assert read is not None
    assert asdict(read.processes[0]) == asdict(dead)
    assert STATE_FILE == VARIABLE


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"processes": [{"name": "x"}]}', '{"processes": 3}'])
def test_a_file_without_restarts_shows_none(text: str | None, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    if text is not None:
        state.write_text(text)

    assert _lines(state) == _lines(None) == []
