"""The cluster secret beside the global table, with which peers authenticate each other."""

import os
import secrets
import stat
import tempfile
from pathlib import Path

from ranktable_tools.errors import RanktableError
from ranktable_tools.json_file import write_private, write_private_first
from ranktable_tools.owner import mode_of_own, whose

SECRET_NAME = "cluster_secret"  # noqa: S105 - a file name
MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4_096
_MAX_UID = 2**32 - 2
_MOVE = "move it away to get a new one"
_RUN_AS = f"run as the file's owner, or {_MOVE}"
_GIVE = "run as the file's owner, or as root with --owner UID"


def ensure_secret(directory: Path, owner: int | None = None) -> tuple[Path, bool]:
    """Write 32 random bytes as hex, mode 0600, unless the file exists; return its path and whether it is new.

    Concurrent callers all get the secret of the first one. Raises RanktableError as `check_secret` does.
    """
    path = directory / SECRET_NAME
    if check_secret(directory, owner):
        return path, False
    secret = secrets.token_hex(32) + "\n"
    if write_private_first(path, secret):
        return path, True
    if check_secret(directory, owner):
        return path, False
    write_private(path, secret)  # replaces a dangling link
    return path, True


def check_secret(directory: Path, owner: int | None = None, *, can_give: bool = False) -> bool:
    """Return whether there is a secret that a start accepts: a private file of this user, root or `owner`.

    Raises RanktableError naming the path and what is wrong; with `can_give` it suggests --owner.
    """
    path = directory / SECRET_NAME
    cure = _GIVE if can_give else _RUN_AS
    try:
        # A pipe in the file's place must not block the open; _check_file rejects it.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_file(path, os.fstat(file.fileno()), {os.geteuid(), 0, owner}, cure)
            size = len(file.read(MAX_SECRET_BYTES + 2).strip())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        remedy = _MOVE
        if isinstance(error, PermissionError):
            remedy = f"{whose(path)}: {cure if mode_of_own(path) is None else f'chmod 600 {path}'}"
        raise RanktableError(f"{path} cannot be read: {error.strerror}; {remedy}") from error
    if not MIN_SECRET_BYTES <= size <= MAX_SECRET_BYTES:
        found = size if size < MIN_SECRET_BYTES else f"more than {MAX_SECRET_BYTES}"
        limits = f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"
        raise RanktableError(f"{path}: a cluster secret has {found} bytes, but must have {limits}; {_MOVE}")
    return True


def check_owner(directory: Path, owner: int) -> None:
    """Raise RanktableError if files in that folder cannot be given to the uid; tried with a temporary file."""
    if not 0 <= owner <= _MAX_UID:
        raise RanktableError(f"--owner is {owner}, but must be a uid from 0 to {_MAX_UID}")
    folder = directory.absolute()
    nearest = next(place for place in (folder, *folder.parents) if os.path.isdir(place))
    if not os.access(nearest, os.W_OK):
        return  # no table can be written there either, and that error is raised later
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            os.chown(file.fileno(), owner, -1)
    except OSError as error:
        reason = f"--owner is {owner}: files in {nearest} cannot be given to that uid: {error.strerror}"
        raise RanktableError(
            f"{reason}; this process is uid {os.geteuid()}: run this with CAP_CHOWN, or as uid {owner}"
        ) from error


def change_owner(path: Path, owner: int) -> None:
    """Change a file's owner to the uid. Raises RanktableError naming path, owner and uid if that is not allowed."""
    try:
        os.chown(path, owner, -1)
    except OSError as error:
        reason = f"{path}: cannot be given to uid {owner}: {error.strerror}"
        raise RanktableError(f"{reason}; {whose(path)}: run as root with --owner UID") from error


def _check_file(path: Path, status: os.stat_result, owners: set[int | None], cure: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise RanktableError(f"{path} is not a regular file; {_MOVE}")
    if mode & 0o077:
        raise RanktableError(f"{path} has mode {mode:04o}, but others must have no access: chmod 600 {path}")
    if status.st_uid not in owners:
        raise RanktableError(f"{path} belongs to uid {status.st_uid}, but this process is uid {os.geteuid()}: {cure}")
