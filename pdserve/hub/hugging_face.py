"""Download a model from the Hugging Face hub with its library, into the library's cache shared with other programs.

hub: list the revision's files, download the small ones (config.json last), then the weights if requested
no hub: the cached snapshot, if it is complete
"""

import errno
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from pdserve.hub.download_job import DownloadJob, Snapshot
from pdserve.hub.files import CONFIG, is_index, is_whole, shards, small_files, weight_file
from wire.errors import ConfigError, Unavailable

_ANSWER_S = 20.0  # timeout of the revision's file listing
_WORKERS = 8
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_TRUE = ("1", "ON", "YES", "TRUE")


def fetch(job: DownloadJob, environ: Mapping[str, str], say: Callable[[str], None]) -> Snapshot:
    """Return the snapshot of `job`, downloading missing files; `say` prints the progress.

    The library finds the token: HF_TOKEN or a login. Raises ConfigError with a message that says what to do.
    """
    hub = _Hub(job, environ.get("HF_ENDPOINT") or "https://huggingface.co")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environ.get(name, "").upper() in _TRUE:
            return _found_here(hub, f"{name} is set")
    try:
        sizes, commit = hub.listing()
    except Unavailable as error:
        found = _found_here(hub, str(error))
        say(f"{error}: using the copy of {job.name} in {found.folder}")
        return found
    return Snapshot(str(_Download(hub, commit, sizes, say).folder()), commit)


class _Hub:
    """Calls the library for one model."""

    def __init__(self, job: DownloadJob, endpoint: str) -> None:
        """Raises ConfigError if the library is missing."""
        try:
            import huggingface_hub
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--model {job.name} is not a local folder, and downloading it needs {error.name}: "
                "pip install huggingface_hub, or pass a folder"
            ) from error
        self.job, self.endpoint, self.library = job, endpoint.rstrip("/"), huggingface_hub

    def listing(self) -> tuple[dict[str, int], str]:
        """Return the sizes of the revision's files, and its commit. Raises ConfigError, Unavailable."""
        api = self.library.HfApi(endpoint=self.endpoint)
        try:
            info = api.model_info(self.job.name, revision=self.job.revision, files_metadata=True, timeout=_ANSWER_S)
        except Exception as error:
            raise self._translate_errors(error) from error
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}, str(info.sha)

    def file(self, name: str, revision: str) -> Path:
        """Return the path of a cached file, downloaded if missing. Raises ConfigError, Unavailable."""
        try:
            path = self.library.hf_hub_download(
                self.job.name, name, revision=revision, cache_dir=self.job.download_dir, endpoint=self.endpoint
            )
        except Exception as error:
            raise self._translate_errors(error) from error
        return Path(path)

    def remember(self, commit: str) -> None:
        """Store the revision's commit in the cache, for use without the hub."""
        revision = self.job.revision or "main"
        known = self.here(CONFIG, revision)
        if known is None or known.parent.name != commit:
            self.file(CONFIG, revision)

    def here(self, name: str, revision: str | None) -> Path | None:
        """Return the path of a cached file, None if missing."""
        found = self.library.try_to_load_from_cache(
            self.job.name, name, cache_dir=self.job.download_dir, revision=revision
        )
        return Path(found) if isinstance(found, str) else None

    def _translate_errors(self, error: Exception) -> ConfigError | Unavailable:
        """Convert a library error to ours; the underlying HTTP library depends on the version."""
        from huggingface_hub import errors

        job, page = self.job, f"{self.endpoint}/{self.job.name}"
        log_in = "set HF_TOKEN to a token that may read it, or log in with `hf auth login`"
        if isinstance(error, errors.GatedRepoError):
            return ConfigError(f"{job.name} is gated: accept its conditions at {page}, then {log_in}")
        if isinstance(error, errors.RevisionNotFoundError):
            return ConfigError(f"{job.name} has no revision {job.revision!r} at {self.endpoint}")
        if isinstance(error, errors.RepositoryNotFoundError):
            return ConfigError(
                f"--model {job.name} is not a local folder, and {self.endpoint} has no such model, or it is "
                f"private: check the name, pass a folder, or {log_in}"
            )
        if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
            status = error.response.status_code
            if status < 500 and status != 429:
                return ConfigError(f"{self.endpoint} returned HTTP {status} for {job}: {_line(error)}")
            return Unavailable(f"{self.endpoint} returned HTTP {status}")
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            return ConfigError(f"{job} cannot be stored here: {_line(error)}")
        return Unavailable(f"{self.endpoint} cannot be reached ({type(error).__name__}: {_line(error)})")


def _found_here(hub: _Hub, why: str) -> Snapshot:
    """Return the cached snapshot. Raises ConfigError if it is missing or incomplete."""
    config = hub.here(CONFIG, hub.job.revision)
    if config is not None and is_whole(config.parent, weights=hub.job.weights):
        return Snapshot(str(config.parent), config.parent.name)
    has = "no copy is cached" if config is None else f"{config.parent} is incomplete"
    raise ConfigError(
        f"--model {hub.job.name} is not a local folder; {why}, and {has}: run `pdserve model path {hub.job.name}` "
        "with network access, or pass a folder"
    )


class _Download:
    """Owns the download of one commit's files."""

    def __init__(self, hub: _Hub, commit: str, sizes: Mapping[str, int], say: Callable[[str], None]) -> None:
        self._hub, self._commit, self._sizes, self._say = hub, commit, sizes, say
        self._num_done = self._bytes_done = 0

    def folder(self) -> Path:
        """Download missing files and return the snapshot's folder."""
        job, names = self._hub.job, list(self._sizes)
        if CONFIG not in names:
            raise ConfigError(f"{job.name} at {self._hub.endpoint} has no {CONFIG}: it cannot be served")
        wanted = small_files(names)
        weights = self._weights(names) if job.weights else []
        missing = [name for name in (*wanted, *weights) if self._hub.here(name, self._commit) is None]
        started, total = time.monotonic(), sum(self._sizes.get(name, 0) for name in missing)
        if missing:
            files = f"{len(missing)} file{'' if len(missing) == 1 else 's'}"
            what = f"{files}, {_megabytes(total)}, commit {self._commit[:12]}"
            self._say(f"downloading {job.name} from {self._hub.endpoint}: {what}")
        for group in ([name for name in wanted if name != CONFIG], [CONFIG], weights):
            self._fetch([name for name in group if name in missing], len(missing), total)
        folder = self._hub.file(CONFIG, self._commit).parent
        self._hub.remember(self._commit)
        if missing:
            self._say(f"downloaded {job.name} in {time.monotonic() - started:.1f} s: {folder}")
        return folder

    def _weights(self, names: Sequence[str]) -> list[str]:
        file = weight_file(self._hub.job.name, names)
        if not is_index(file):
            return [file]
        found = shards(self._hub.file(file, self._commit))
        missing = sorted(set(found) - set(names))
        if missing:
            raise ConfigError(f"{self._hub.job.name}: {file} lists {missing[0]}, which the repository lacks")
        return found

    def _fetch(self, names: Sequence[str], count: int, total: int) -> None:
        with ThreadPoolExecutor(_WORKERS) as threads:
            for future in as_completed([threads.submit(self._fetch_file, name) for name in names]):
                name = future.result()
                self._num_done += 1
                self._bytes_done += self._sizes.get(name, 0)
                if self._sizes.get(name, 0) > 10_000_000:
                    far = f"{self._num_done} of {count} files, {_megabytes(self._bytes_done)} of {_megabytes(total)}"
                    self._say(f"downloaded {name} ({far})")

    def _fetch_file(self, name: str) -> str:
        self._hub.file(name, self._commit)
        return name


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or "no message"
