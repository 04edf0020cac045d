"""The limit of open files, in its own process: a hard limit once lowered stays lowered."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys
from scheduler.http.open_files import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
changed = raise_open_files()
print(changed, *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "after", "warns"),
    [(1024, 9000, 9000, False), (256, 2048, 2048, True), (2048, 2048, 2048, True), (9000, 9000, 9000, False)],
)
def test_the_soft_file_limit_is_raised_and_a_low_one_is_logged(soft: int, hard: int, after: int, warns: bool) -> None:
    command = [sys.executable, "-c", CODE, str(soft), str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)

    assert done.stdout.split() == [str(after), str(after), str(hard)]
    assert ("few_open_files" in done.stderr) == warns
