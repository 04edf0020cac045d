"""Fetch a model from ModelScope, by its library: into that library's cache."""

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


def fetch(asked: DownloadJob, environ: Mapping[str, str], say: Callable[[str], None]) -> Snapshot:
    """Return the snapshot of `asked`; .bin weights only where there are no others.

    Raises ConfigError, in words, where the library is missing or says no.
    """
    download = _library(asked)
    if any(environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "MODELSCOPE_OFFLINE")):
        return _snapshot(asked, download, offline=True)
    say(f"looking up {asked} at ModelScope")
    try:
        return _snapshot(asked, download, offline=False)
    except _NotGiven as error:
        try:
            found = _snapshot(asked, download, offline=True)
        except ConfigError:
            raise error from error.__cause__
        say(f"ModelScope does not give {asked} ({_words(error.__cause__)}): taking it as it is in {found.folder}")
        return found


class _NotGiven(ConfigError):
    """The library raised something."""


def _snapshot(asked: DownloadJob, download: Callable[..., Any], *, offline: bool) -> Snapshot:
    """Return the whole of what is wanted. Raises ConfigError, `_NotGiven` for what the library says."""

    def take(patterns: tuple[str, ...]) -> Path:
        try:
            return Path(
                download(
                    asked.name, revision=asked.revision, cache_dir=asked.download_dir, local_files_only=offline,
                    allow_patterns=list(patterns),
                )
            )  # fmt: skip
        except Exception as error:
            raise _NotGiven(
                f"--model {asked.name} is no folder here, and ModelScope does not give it ({_words(error)}): look for "
                "a mistake in the name, or give a folder; a private one needs MODELSCOPE_API_TOKEN"
            ) from error

    folder = take(_SMALL + _SAFETENSORS if asked.weights else _SMALL)
    if asked.weights and not is_whole(folder, weights=True):
        folder = take(_SMALL + _BIN)
    if not is_whole(folder, weights=asked.weights):
        what = f"{CONFIG} and weights" if asked.weights else CONFIG
        raise ConfigError(f"{asked} of ModelScope has not got {what} in {folder}")
    return Snapshot(str(folder))


def _words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _library(asked: DownloadJob) -> Callable[..., Any]:
    try:
        from modelscope.hub.snapshot_download import snapshot_download
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--model {asked.name} from ModelScope needs {error.name}: pip install 'pdserve[modelscope]', or give "
            "a folder, or --hub huggingface (VLLM_USE_MODELSCOPE unset)"
        ) from error
    return snapshot_download  # type: ignore[no-any-return]
