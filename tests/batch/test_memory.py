"""Memory is flat over the longest accepted input: only a line's position is kept."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batch.scripted import line, write_lines
from tests.batch.test_kill import CLONE

DEADLINE_S = 400.0
MAX_GROWTH_KIB = 24 * 2**10
PROMPT = "word " * 300


def _peak_kib(folder: Path, num_lines: int) -> int:
    folder.mkdir()
    lines = (line(n, body={"n": n + 1, "prompt": PROMPT}) for n in range(num_lines))
    size = write_lines(folder / "in.jsonl", lines).stat().st_size
    command = [sys.executable, "-m", "tests.batch.killed_run", str(folder)]
    ran = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    reported = re.search(r"peak (\d+) KiB", ran.stdout)
    assert reported
    assert (folder / "out.jsonl").stat().st_size > size
    return int(reported[1])


@pytest.mark.long
def test_50_000_lines_of_80_mb_take_only_the_memory_of_positions(tmp_path: Path) -> None:
    few, many = _peak_kib(tmp_path / "few", 500), _peak_kib(tmp_path / "many", 50_000)

    assert many - few < MAX_GROWTH_KIB
