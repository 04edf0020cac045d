"""A temporary folder for the tables and logs of a command's processes."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def work_folder(command: str) -> Iterator[Path]:
    """Create the folder; keep it only after a failure that left logs, not after Ctrl-C or SIGTERM."""
    work = Path(tempfile.mkdtemp(prefix=f"pdserve-{command}-"))
    try:
        yield work
    except Exception:
        with contextlib.suppress(OSError):
            work.rmdir()  # succeeds only if it is empty, without logs
        raise
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)
