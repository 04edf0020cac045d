"""Download a model from ModelScope with its library, into the library's cache."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.checkpoints.bin_files import BIN_NAME
from pdserve.hub.download_job import DownloadJob, Snapshot
from pdserve.hub.files import CONFIG, is_whole
from wire.errors import ConfigError

_SMALL = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
_SAFETENSORS = ("model*.safetensors",)
_BIN = (BIN_NAME, "pytorch_model-*.bin")
_TRUE = ("1", "ON", "YES", "TRUE")


def fetch(job: DownloadJob, environ: Mapping[str, str], say: Callable[[str], None]) -> Snapshot:
    """Return the snapshot of `job`, with .bin weights only if its safetensors are not complete.

    Raises ConfigError if the library is missing, or provides no complete snapshot, neither new nor cached.
    """
    download = _load_library(job)
    if any(environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "MODELSCOPE_OFFLINE")):
        return _snapshot(job, download, offline=True)
    say(f"looking up {job} on ModelScope")
    try:
        return _snapshot(job, download, offline=False)
    except _LibraryError as error:
        try:
            found = _snapshot(job, download, offline=True)
        except ConfigError:
            raise error from error.__cause__
        say(f"ModelScope did not provide {job} ({_message(error.__cause__)}): using the copy in {found.folder}")
        return found


class _LibraryError(ConfigError):
    """The library raised an error."""


def _snapshot(job: DownloadJob, download: Callable[..., Any], *, offline: bool) -> Snapshot:
    """Return the complete snapshot. Raises ConfigError, and `_LibraryError` for an error of the library."""

    def take(patterns: tuple[str, ...]) -> Path:
        try:
            return Path(
                download(
                    job.name, revision=job.revision, cache_dir=job.download_dir, local_files_only=offline,
                    allow_patterns=list(patterns),
                )
            )  # fmt: skip
        except Exception as error:
            why = "no copy of it is cached" if offline else "ModelScope did not provide it"
            raise _LibraryError(
                f"--model {job.name} is not a local folder, and {why} ({_message(error)}): "
                "check the name, or pass a folder; a private model needs MODELSCOPE_API_TOKEN"
            ) from error

    folder = take(_SMALL + _SAFETENSORS if job.weights else _SMALL)
    if job.weights and not is_whole(folder, weights=True):
        folder = take(_SMALL + _BIN)
    if not is_whole(folder, weights=job.weights):
        what = f"{CONFIG} and weights" if job.weights else CONFIG
        raise ConfigError(f"{job} from ModelScope is incomplete: {folder} needs {what}")
    return Snapshot(str(folder))


def _message(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _load_library(job: DownloadJob) -> Callable[..., Any]:
    try:
        from modelscope.hub.snapshot_download import snapshot_download
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--model {job.name} from ModelScope needs {error.name}: pip install 'pdserve[modelscope]', or pass "
            "a folder, or use --hub huggingface (with VLLM_USE_MODELSCOPE unset)"
        ) from error
    return snapshot_download  # type: ignore[no-any-return]
