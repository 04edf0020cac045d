"""The flags of `pdserve run-batch` alone."""

from dataclasses import dataclass

from wire.options import flag, parse_bytes


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Flags of `run-batch` beside -i and -o; those of engine and front end say how the model answers."""

    error_file: str | None = flag(None, "file for the lines that failed, again, in the same form (default: none)")
    retry_failed: bool = flag(
        False, "keep the good answers of the output that is there and ask its failed and missing lines again"
    )
    base_url: str | None = flag(
        None, "ask the server that runs there, as http://host:9000 (default: load the model into this process)"
    )
    max_inflight: int | None = flag(
        None, "most lines asked at once (default: 512, and 64 of a server at --base-url)", parse=int
    )
    request_timeout: float | None = flag(
        None, "longest that a line may wait for its answer, in seconds; then that is its error (default: 86400, and "
        "3600 of a server at --base-url)", parse=float,
    )  # fmt: skip
    output_tmp_dir: str | None = flag(
        None, "folder where an output that goes to a URL is written first (default: one in pdserve's cache)"
    )
    enable_metrics: bool = flag(False, "serve Prometheus' figures while it runs, on --host and --port (8000)")
    metrics_port: int | None = flag(None, "the same, on this port (default: none)", parse=int)
    allow_private_urls: tuple[str, ...] = flag(
        (), "networks that -i and -o may be on beside public ones, as 10.0.0.0/8,127.0.0.1/32", many=True
    )
    max_input_bytes: int = flag(200 * 2**20, "largest input file, as 200MiB", parse=parse_bytes)
    max_input_lines: int = flag(50_000, "most lines of it", parse=int)
    max_line_bytes: int = flag(2**20, "longest line of it, as 1MiB", parse=parse_bytes)
