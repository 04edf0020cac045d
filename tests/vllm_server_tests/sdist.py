"""vLLM's sdist as data: downloaded once, checked by its sha256, and only its tests of the HTTP server unpacked.

Nothing of it is part of this repository, and nothing but those tests is ever run.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

VERSION = "0.33.0"
SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
_ARCHIVE = f"vllm-{VERSION}.tar.gz"
_FOLDER = f"vllm-{VERSION}/tests/entrypoints/"
_ROOT = f"vllm-{VERSION}/"
_INDEX = "https://pypi.org/simple"  # PIP_INDEX_URL names another
_JSON = "application/vnd.pypi.simple.v1+json"
_TIMEOUT_S = 60.0


class NoSdist(Exception):
    """The reason why the sdist is not available."""


def server_tests(cache: Path) -> Path:
    """Return the folder that has vLLM's `tests/entrypoints`, made below `cache` if needed. Raises NoSdist."""
    root = cache / "vllm-server-tests" / VERSION
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one worker downloads
        if not root.is_dir():
            _make(root)
    return root


def _make(root: Path) -> None:
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=root.parent))
    try:
        archive = draft / _ARCHIVE
        digest = _download(_address(), archive)
        if digest != SHA256:
            raise NoSdist(f"{_ARCHIVE}: its sha256 is {digest}, not {SHA256}")
        _unpack(archive, draft / "files")
        (draft / "files").replace(root)
    except OSError as error:
        raise NoSdist(f"{_ARCHIVE} could not be downloaded: {error}") from error
    finally:
        shutil.rmtree(draft)


def _address() -> str:
    """Return the archive's URL, by the index's JSON (PEP 691)."""
    page = f"{os.environ.get('PIP_INDEX_URL', _INDEX).rstrip('/')}/vllm/"
    request = urllib.request.Request(page, headers={"Accept": _JSON})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        if answer.headers.get_content_type() != _JSON:
            raise NoSdist(f"{page} answers {answer.headers.get_content_type()}, not {_JSON}")
        files = json.load(answer)["files"]
        found = [str(file["url"]) for file in files if file["filename"] == _ARCHIVE]
    if not found:
        raise NoSdist(f"{page} has no {_ARCHIVE}")
    return urllib.parse.urljoin(page, found[0])


def _download(url: str, target: Path) -> str:
    """Write the file; return its sha256."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer, target.open("wb") as file:
        shutil.copyfileobj(answer, file)
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the tests' Python files, with no package file in `tests`: modules of ours are imported below that name."""
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.startswith(_FOLDER) and member.name.endswith(".py"):
                member.name = member.name.removeprefix(_ROOT)
                tar.extract(member, folder, filter="data")
