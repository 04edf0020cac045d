"""The options of a batch run, and the error of a run that ends early."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from batch.settings_note import note_of
from wire.errors import ConfigError, PdserveError


class BatchStopped(PdserveError):
    """The run ended before its output was written; its answers are kept, and the same job resumes from there."""


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Limits of an input: its bytes, its requests (not counting blank lines) and the bytes of one line."""

    max_bytes: int = 200 * 2**20
    max_lines: int = 50_000
    max_line_bytes: int = 2**20


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a line is retried before the last failure becomes its error.

    The wait doubles from `first_delay_s` to `max_delay_s`; a Retry-After lengthens it to at most `max_retry_after_s`.
    A line is tried `busy_attempts` times while the server is busy (429, 529), and `attempts` times if the server fails
    or is down. A try without a complete answer after `timeout_s` is the last: a line that hangs once would hang again.
    """

    attempts: int = 10
    busy_attempts: int = 60
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_retry_after_s: float = 300.0
    timeout_s: float = 3600.0

    def delay_s(self, failures: int, retry_after_s: float, spread: float) -> float:
        """Return the wait after the `failures`-th failed try in a row; `spread` in [0, 1) is the jitter."""
        backoff = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(failures - 1, 30)) * (0.5 + spread / 2)
        return max(backoff, min(retry_after_s, self.max_retry_after_s) * (1 + spread / 10))


@dataclass(frozen=True, slots=True)
class BatchJob:
    """The local files and the options of a run. The output has an answer to every line, in the order of the input.

    `error_path` gets a copy of the failed lines. The answers depend on the input and on `answer_settings`, such as
    model and dtype: a stopped run resumes only if both are the same. `retry_failed` keeps the good answers of the
    existing output, and of a stopped run, and sends the other lines again.
    """

    input_path: Path
    output_path: Path
    error_path: Path | None = None
    answer_settings: Mapping[str, str] = field(default_factory=dict)
    max_inflight: int = 256
    limits: InputLimits = InputLimits()
    retries: RetryPolicy = RetryPolicy()
    retry_failed: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.max_inflight < 1:
            raise ConfigError(f"--max-inflight is {self.max_inflight}, but must be at least 1")
        for path, what in ((self.output_path, "the output"), (self.error_path, "the error file")):
            if path is not None and not path.name:
                raise ConfigError(f"{what} {path} is a folder: name a file")

    @property
    def journal_path(self) -> Path:
        """Where answers are kept until the output is written."""
        return self.output_path.with_name(self.output_path.name + ".journal")

    @property
    def note_path(self) -> Path:
        """Where `answer_settings` are kept for a retry while the output has failed lines."""
        return note_of(self.output_path)
