"""A folder for this process alone, which the next one takes away where this one is killed."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "pdserve-ray-"
_LOCK = "lock"


class PrivateFolder:
    """Owns a new folder of mode 0700 and, while the process lives, the lock in it that says so."""

    def __init__(self, base: Path | None = None) -> None:
        base = base or Path(tempfile.gettempdir())
        sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        draft = self.path / f"{_LOCK}.new"
        self._held = draft.open("w")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        draft.rename(self.path / _LOCK)  # seen only once it is held

    def close(self) -> None:
        """Take it away."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()


def sweep(base: Path) -> None:
    """Take away the folders of ours whose processes are gone: nobody holds their locks."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            with (folder / _LOCK).open("r+") as lock:
                if os.fstat(lock.fileno()).st_uid != os.getuid():
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, another user's, or going away
            continue
