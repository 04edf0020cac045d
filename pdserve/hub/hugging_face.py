"""Fetch a model from the Hugging Face hub, by its library: into that library's cache, which others share.

hub: what is at the revision --small files, config.json last--> --weights--> snapshot folder of the commit
no hub: the snapshot that is here, where it is whole
"""

import errno
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from pdserve.hub.download_job import DownloadJob, Snapshot
from pdserve.hub.files import CONFIG, is_index, is_whole, shards, small_files, weight_file
from wire.errors import ConfigError, Unavailable

_ANSWER_S = 20.0  # of the hub, to what is at a revision
_WORKERS = 8
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_TRUE = ("1", "ON", "YES", "TRUE")


def fetch(asked: DownloadJob, environ: Mapping[str, str], say: Callable[[str], None]) -> Snapshot:
    """Return the snapshot of `asked`, fetched where files of it are missing; `say` is told what takes time.

    The token is the library's: HF_TOKEN, or a login's. Raises ConfigError, in words, with what to do.
    """
    hub = _Hub(asked, environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if any(environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return _found_here(hub, "HF_HUB_OFFLINE is set")
    try:
        sizes, commit = hub.listing()
    except Unavailable as error:
        found = _found_here(hub, str(error))
        say(f"{error}: taking {asked.name} as it is in {found.folder}")
        return found
    return Snapshot(str(_Download(hub, commit, sizes, say).folder()), commit)


class _Hub:
    """The library, asked for one model."""

    def __init__(self, asked: DownloadJob, endpoint: str) -> None:
        """Raises ConfigError where the library is missing."""
        try:
            import huggingface_hub
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--model {asked.name} is no folder here, and fetching it needs {error.name}: "
                "pip install huggingface_hub, or give a folder"
            ) from error
        self.asked, self.endpoint, self.library = asked, endpoint.rstrip("/"), huggingface_hub

    def listing(self) -> tuple[dict[str, int], str]:
        """Return the files of the revision with their bytes, and its commit. Raises ConfigError, Unavailable."""
        api = self.library.HfApi(endpoint=self.endpoint)
        try:
            info = api.model_info(self.asked.name, revision=self.asked.revision, files_metadata=True, timeout=_ANSWER_S)
        except Exception as error:
            raise self._told(error) from error
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}, str(info.sha)

    def file(self, name: str, revision: str) -> Path:
        """Return a file of the cache, fetched where it is missing. Raises ConfigError, Unavailable."""
        try:
            path = self.library.hf_hub_download(
                self.asked.name, name, revision=revision, cache_dir=self.asked.download_dir, endpoint=self.endpoint
            )
        except Exception as error:
            raise self._told(error) from error
        return Path(path)

    def remember(self, commit: str) -> None:
        """Let the cache know which commit the revision is, for when there is no hub."""
        revision = self.asked.revision or "main"
        known = self.here(CONFIG, revision)
        if known is None or known.parent.name != commit:
            self.file(CONFIG, revision)

    def here(self, name: str, revision: str | None) -> Path | None:
        """Return a file of the cache, None where it is not there."""
        found = self.library.try_to_load_from_cache(
            self.asked.name, name, cache_dir=self.asked.download_dir, revision=revision
        )
        return Path(found) if isinstance(found, str) else None

    def _told(self, error: Exception) -> ConfigError | Unavailable:
        """Say in words what the library met; which HTTP library's errors those are depends on its version."""
        from huggingface_hub import errors

        asked, page = self.asked, f"{self.endpoint}/{self.asked.name}"
        log_in = "set HF_TOKEN to a token that may read it, or log in by `hf auth login`"
        if isinstance(error, errors.GatedRepoError):
            return ConfigError(f"{asked.name} is gated: accept its conditions at {page}, then {log_in}")
        if isinstance(error, errors.RevisionNotFoundError):
            return ConfigError(f"{asked.name} has no revision {asked.revision!r} at {self.endpoint}")
        if isinstance(error, errors.RepositoryNotFoundError):
            return ConfigError(
                f"--model {asked.name} is no folder here, and {self.endpoint} has no model of that name, or a private "
                f"one: look for a mistake in it, give a folder, or {log_in}"
            )
        if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
            status = error.response.status_code
            if status < 500 and status != 429:
                return ConfigError(f"{self.endpoint} answers {status} for {asked}: {_line(error)}")
            return Unavailable(f"{self.endpoint} answers {status}")
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            return ConfigError(f"{asked} cannot be kept here: {_line(error)}")
        return Unavailable(f"{self.endpoint} cannot be reached ({type(error).__name__}: {_line(error)})")


def _found_here(hub: _Hub, why: str) -> Snapshot:
    """Return the snapshot of the cache. Raises ConfigError where there is none, or not all of it."""
    config = hub.here(CONFIG, hub.asked.revision)
    if config is not None and is_whole(config.parent, weights=hub.asked.weights):
        return Snapshot(str(config.parent), config.parent.name)
    has = "no copy of it is here" if config is None else f"{config.parent} has only a part of it"
    raise ConfigError(
        f"--model {hub.asked.name} is no folder here; {why}, and {has}: run `pdserve model path {hub.asked.name}` "
        "where there is a network, or give a folder"
    )


class _Download:
    """Owns the fetching of one commit's files."""

    def __init__(self, hub: _Hub, commit: str, sizes: Mapping[str, int], say: Callable[[str], None]) -> None:
        self._hub, self._commit, self._sizes, self._say = hub, commit, sizes, say
        self._num_done = self._bytes_done = 0

    def folder(self) -> Path:
        """Fetch what is missing and return the snapshot's folder."""
        asked, names = self._hub.asked, list(self._sizes)
        if CONFIG not in names:
            raise ConfigError(
                f"{asked.name} at {self._hub.endpoint} has no {CONFIG}: it is no model that can be served"
            )
        wanted = small_files(names)
        weights = self._weights(names) if asked.weights else []
        missing = [name for name in (*wanted, *weights) if self._hub.here(name, self._commit) is None]
        started, total = time.monotonic(), sum(self._sizes.get(name, 0) for name in missing)
        if missing:
            what = f"{len(missing)} files, {_megabytes(total)}, commit {self._commit[:12]}"
            self._say(f"downloading {asked.name} from {self._hub.endpoint}: {what}")
        for group in ([name for name in wanted if name != CONFIG], [CONFIG], weights):
            self._fetch([name for name in group if name in missing], len(missing), total)
        folder = self._hub.file(CONFIG, self._commit).parent
        self._hub.remember(self._commit)
        if missing:
            self._say(f"downloaded {asked.name} in {time.monotonic() - started:.1f} s: {folder}")
        return folder

    def _weights(self, names: Sequence[str]) -> list[str]:
        file = weight_file(self._hub.asked.name, names)
        if not is_index(file):
            return [file]
        found = shards(self._hub.file(file, self._commit))
        missing = sorted(set(found) - set(names))
        if missing:
            raise ConfigError(f"{self._hub.asked.name}: {file} names {missing[0]}, which the repository has not got")
        return found

    def _fetch(self, names: Sequence[str], count: int, total: int) -> None:
        with ThreadPoolExecutor(_WORKERS) as threads:
            for future in as_completed([threads.submit(self._one, name) for name in names]):
                name = future.result()
                self._num_done += 1
                self._bytes_done += self._sizes.get(name, 0)
                if self._sizes.get(name, 0) > 10_000_000:
                    far = f"{self._num_done} of {count} files, {_megabytes(self._bytes_done)} of {_megabytes(total)}"
                    self._say(f"downloaded {name} ({far})")

    def _one(self, name: str) -> str:
        self._hub.file(name, self._commit)
        return name


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or "no words"
