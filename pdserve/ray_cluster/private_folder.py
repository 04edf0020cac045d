"""A folder private to this process; if the process is killed, the next one deletes it."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "pdserve-ray-"
_LOCK = "lock"


class PrivateFolder:
    """Owns a new folder of mode 0700, and a lock in it that is held while the process lives."""

    def __init__(self, base: Path | None = None) -> None:
        base = base or Path(tempfile.gettempdir())
        sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        draft = self.path / f"{_LOCK}.new"
        self._held = draft.open("w")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        draft.rename(self.path / _LOCK)  # visible only once it is locked

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()


def sweep(base: Path) -> None:
    """Delete our folders whose processes are gone: their locks are free."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            with (folder / _LOCK).open("r+") as lock:
                if os.fstat(lock.fileno()).st_uid != os.getuid():
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, another user's, or being deleted
            continue
