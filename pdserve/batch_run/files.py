"""The local files of a batch: an input URL is downloaded before the run, an output URL uploaded after it."""

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from batch.job import BatchStopped
from batch.settings_note import note_of, remove_note
from pdserve.batch_run.interruption import Interruption
from pdserve.batch_run.request import BatchRequest
from pdserve.run_folder import default_cache_dir
from remote_files.addresses import AddressRules
from remote_files.download import download
from remote_files.limits import DownloadLimits
from remote_files.reachable import check_resolves
from remote_files.redaction import redacted
from remote_files.upload import upload
from remote_files.url import RemoteUrl, is_remote
from wire.errors import ConfigError, PdserveError

_FOLDER = "run-batch"


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Local paths. `target` is the URL to upload the finished output to, None to keep it here."""

    input: Path
    output: Path
    error: Path | None
    target: RemoteUrl | None

    @property
    def is_answered(self) -> bool:
        """Whether an earlier run answered every line but could not upload the output."""
        return self.target is not None and self.output.exists()


@contextlib.contextmanager
def local_files(request: BatchRequest, interruption: Interruption, environ: Mapping[str, str]) -> Iterator[BatchFiles]:
    """Fetch the input if it is at a URL and yield the paths; a download is deleted on exit. Raises PdserveError."""
    rules = AddressRules.of(request.scheduler.allow_private_urls)
    target = _upload_url(request)
    if target is not None:
        interruption.run(check_resolves(target, rules))
    with contextlib.ExitStack() as stack:
        source = Path(request.input_file)
        if is_remote(request.input_file):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-batch-"))
            source = Path(folder) / "input.jsonl"
            limits = DownloadLimits(max_bytes=request.options.max_input_bytes)
            interruption.run(download(request.input_file, source, rules=rules, limits=limits))
        output = Path(request.output_file) if target is None else _pending_path(request, source, environ)
        error = None if request.options.error_file is None else Path(request.options.error_file)
        yield BatchFiles(source, output, error, target)


def send(request: BatchRequest, files: BatchFiles, interruption: Interruption) -> None:
    """Upload the output to its URL and delete it here. Raises BatchStopped with the path where it is kept."""
    rules = AddressRules.of(request.scheduler.allow_private_urls)
    try:
        interruption.run(upload(files.output, request.output_file, rules=rules))
    except PdserveError as error:
        kept = f"all answers are kept in {files.output}: the same command uploads them"
        raise BatchStopped(f"{error}; {kept}") from error
    files.output.unlink(missing_ok=True)
    remove_note(note_of(files.output))


def _upload_url(request: BatchRequest) -> RemoteUrl | None:
    """Return the upload URL, None for a local output. Raises ConfigError for errors detectable now."""
    ends, errors = (request.input_file, request.output_file), request.options.error_file
    if errors is not None and is_remote(errors):
        raise ConfigError(f"--error-file {redacted(errors)} is a URL: use a local file")
    if not is_remote(ends[1]):
        return None
    if request.options.retry_failed:
        raise ConfigError(f"--retry-failed reads the previous run's output, but {redacted(ends[1])} is write-only")
    if is_remote(ends[0]) and _without_query(ends[0]) == _without_query(ends[1]):
        raise ConfigError(f"the output {redacted(ends[1])} is the input: choose another path")
    target = RemoteUrl.parse(ends[1])
    if target.expires_at is not None and target.expires_at <= datetime.now(UTC):
        raise ConfigError(f"{target} has expired at {target.expires_at:%Y-%m-%d %H:%M:%S} UTC: get a newly signed one")
    return target


def _pending_path(request: BatchRequest, source: Path, environ: Mapping[str, str]) -> Path:
    """Return the path of an output before upload.

    It is the same for one input, one set of the flags that answers depend on, and one URL, whatever its signature.
    """
    chosen = request.options.output_tmp_dir
    folder = default_cache_dir(environ) / _FOLDER if chosen is None else Path(chosen)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with source.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from error
    name = "\n".join((content, _without_query(request.output_file), str(sorted(request.answer_settings.items()))))
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.jsonl"


def _without_query(url: str) -> str:
    return url.partition("?")[0]
