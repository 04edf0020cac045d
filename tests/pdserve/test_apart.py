"""What is done apart leaves its files, and nothing else."""

import os
import sys
from pathlib import Path

from pdserve.apart import apart


def test_what_it_makes_is_there_and_what_it_imports_is_not(tmp_path: Path) -> None:
    def work() -> None:
        import this  # a module that nobody else imports

        (tmp_path / "made").write_text(f"{this.__name__} {os.getpid()}")

    apart(work)

    name, pid = (tmp_path / "made").read_text().split()
    assert name == "this"
    assert int(pid) != os.getpid()
    assert "this" not in sys.modules


def test_its_failure_ends_nothing_here() -> None:
    apart(lambda: sys.exit(3))
    apart(lambda: 1 // 0)
