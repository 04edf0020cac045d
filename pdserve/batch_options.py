"""The flags that only `pdserve run-batch` has."""

from dataclasses import dataclass

from flags.options import flag, parse_bytes


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Flags of `run-batch` besides -i and -o, and besides those of engine and scheduler."""

    error_file: str | None = flag(None, "file that also gets the failed lines, in the output's form (default: none)")
    retry_failed: bool = flag(
        False, "keep the good answers of the existing output and retry its failed and missing lines"
    )
    base_url: str | None = flag(
        None, "use the server at this URL, such as http://host:9000 (default: load the model into this process)"
    )
    max_inflight: int | None = flag(None, "maximum lines in flight (default: 512, or 64 with --base-url)", parse=int)
    request_timeout: float | None = flag(
        None, "seconds that a line waits for its answer before it fails (default: 86400, or 3600 with --base-url)",
        parse=float,
    )  # fmt: skip
    output_tmp_dir: str | None = flag(
        None, "folder for an output before it is uploaded to a URL (default: one in pdserve's cache)"
    )
    enable_metrics: bool = flag(
        False, "serve Prometheus metrics during the run, on --host and --port (default port: 8000)"
    )
    metrics_port: int | None = flag(
        None, "serve the metrics on this port, even without --enable-metrics (default: none)", parse=int
    )
    max_input_bytes: int = flag(200 * 2**20, "largest input file, such as 200MiB", parse=parse_bytes)
    max_input_lines: int = flag(50_000, "maximum number of input lines", parse=int)
    max_line_bytes: int = flag(2**20, "longest input line, such as 1MiB", parse=parse_bytes)
