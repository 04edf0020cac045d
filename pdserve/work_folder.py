"""A folder for the tables and logs of processes that a command starts and stops."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def work_folder(command: str) -> Iterator[Path]:
    """Make one; it stays where something failed and left logs, and not after Ctrl-C or SIGTERM."""
    work = Path(tempfile.mkdtemp(prefix=f"pdserve-{command}-"))
    try:
        yield work
    except Exception:
        with contextlib.suppress(OSError):
            work.rmdir()  # where nothing is in it there are no logs to keep
        raise
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)
