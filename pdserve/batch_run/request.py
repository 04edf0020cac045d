"""Parse the command line of `pdserve run-batch`."""

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flags.options import EngineOptions, add_flags, from_namespace
from pdserve.batch_options import BatchOptions
from pdserve.client import own_key
from pdserve.engine_flags import refuse_empty
from pdserve.flags.parser import CommandParser
from scheduler.config import SchedulerOptions
from scheduler.http.keys import read_keys
from wire.errors import ConfigError

METRICS_PORT = 8000
MAX_INFLIGHT = 65_536
_INFLIGHT, _INFLIGHT_AT_URL = 512, 64
_LINE_S, _LINE_AT_URL_S = 86_400.0, 3600.0  # in this process lines only wait for earlier lines
EPILOG = """\
examples:
  pdserve run-batch -i requests.jsonl -o results.jsonl --model ~/models/Qwen3-0.6B
  pdserve run-batch -i requests.jsonl -o results.jsonl --base-url http://127.0.0.1:9000
  pdserve run-batch -i requests.jsonl -o results.jsonl --base-url http://127.0.0.1:9000 --retry-failed
  pdserve run-batch -i "https://bucket...?X-Amz-..." -o "https://bucket...?X-Amz-..." --model facebook/opt-125m

Repeat the same command to resume a run that was stopped in any way: docs/batch.md.
"""
_TABLES = (
    "global_rank_table", "node_ports", "use_openai", "http_port", "ip", "kv_ip", "share_devices", "connector",
    "worker_api_key_file", "worker_callback",
)  # fmt: skip
_SERVERS = (
    "api_key", "api_key_file", "protect_metrics", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs",
    "allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials", "root_path",
    "sse_keep_alive_interval", "client_timeout", "orphan_limit", "enable_docs", "enable_dev_routes", "responses_store",
    "responses_store_count", "responses_store_bytes", "responses_store_ttl",
)  # fmt: skip
_USELESS = (
    "kv_transport", "kv_links", "kv_digests", "kv_port_range", "tls_cert", "tls_key", "tls_ca", "retry_share",
    "min_retries", "startup_timeout", "shutdown_timeout", "first_token_timeout", "max_queued_requests",
    "max_queued_tokens", "enable_force_include_usage", "enable_tokenizer_info_endpoint", "max_body_bytes",
)  # fmt: skip
"""Flags accepted but not shown: those for KV links and for servers with clients, and limits that do not apply here."""
_ANSWERS_DEPEND_ON = (
    "model", "revision", "hub", "served_model_name", "dtype", "device", "quantization", "max_model_len", "engine",
    "chat_template", "chat_template_content_format", "default_chat_template_kwargs", "trust_request_chat_template",
    "generation_config", "override_generation_config", "max_logprobs", "return_tokens_as_token_ids",
    "enable_prompt_tokens_details", "max_answer_bytes", "tool_call_parser", "reasoning_parser",
)  # fmt: skip
_KEYS = {
    "api_key": "API key for --base-url (env PDSERVE_API_KEY, VLLM_API_KEY). Any user of this host can see a command "
    "line: prefer the variable or --api-key-file",
    "api_key_file": "file whose first line is the API key",
}
_WITH_URL = (
    "model", "served_model_name", "host", "port", "log_level", "log_format", "api_key", "api_key_file",
    "allow_private_urls",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch to run. `metrics` is the address of the metrics endpoint, if any; `api_key` is sent to --base-url.

    `namespace` has the given engine and scheduler flags, without the model's defaults; `typed` names the typed fields.
    """

    input_file: str = dataclasses.field(repr=False)
    output_file: str = dataclasses.field(repr=False)
    options: BatchOptions
    namespace: argparse.Namespace = dataclasses.field(repr=False)
    typed: frozenset[str]
    metrics: tuple[str, int] | None
    api_key: str | None = dataclasses.field(repr=False)

    @property
    def engine(self) -> EngineOptions:
        """The given engine flags."""
        return from_namespace(EngineOptions, self.namespace)

    @property
    def scheduler(self) -> SchedulerOptions:
        """The given scheduler flags, without those of the HTTP server: this process has no other clients.

        Its queue has room for --max-inflight lines: no line is refused or times out in the queue.
        """
        given = {name: value for name, value in vars(self.namespace).items() if name not in _SERVERS}
        without_queue_limits = {
            "first_token_timeout": _LINE_S,
            "max_queued_requests": MAX_INFLIGHT,
            "max_queued_tokens": self.max_inflight * self.options.max_line_bytes,
        }
        return from_namespace(SchedulerOptions, argparse.Namespace(**without_queue_limits | given))

    @property
    def answer_settings(self) -> dict[str, str]:
        """The flags that the answers depend on: a stopped run resumes only with the same values."""
        given = {_flag(name): _as_typed(getattr(self.namespace, name, "")) for name in _ANSWERS_DEPEND_ON}
        at_url = "" if self.options.base_url is None else "a server"
        return {name: value for name, value in (given | {"--base-url": at_url}).items() if value}

    @property
    def max_inflight(self) -> int:
        """The number of lines in flight."""
        return self.options.max_inflight or (_INFLIGHT if self.options.base_url is None else _INFLIGHT_AT_URL)

    @property
    def request_timeout_s(self) -> float:
        """How long a line may wait for its answer."""
        return self.options.request_timeout or (_LINE_S if self.options.base_url is None else _LINE_AT_URL_S)


def command_parser() -> CommandParser:
    """Return the parser of run-batch."""
    parser = CommandParser(
        serves=True,
        prog="pdserve run-batch",
        usage="pdserve run-batch -i FILE -o FILE [flags]",
        description="Answer every line of a file in OpenAI's batch format. Files are local or at http(s) URLs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="one request per line: path or URL")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="one answer per line: path or URL")
    parser.add_argument("--url", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    options = (BatchOptions, "batch"), (EngineOptions, None), (SchedulerOptions, None)
    for options_type, title in options:
        add_flags(parser, options_type, title)
    for action in parser._actions:
        if action.dest in (*_TABLES, *_SERVERS[2:], *_USELESS):
            action.help = argparse.SUPPRESS  # still parsed, so that messages can give the reason
        elif action.dest in _KEYS:
            action.help = _KEYS[action.dest]
        elif action.dest in ("host", "port"):
            action.help = f"{action.dest} of the metrics, with --enable-metrics or --metrics-port"
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> BatchRequest:
    """Parse the command line. Raises ConfigError; prints flags without effect on stderr."""
    parser = command_parser()
    namespace = parser.parse_args(argv)
    refuse_empty(namespace)
    typed = frozenset(vars(namespace)) - frozenset(parser.from_file)
    _check_tables(namespace, typed)
    options = from_namespace(BatchOptions, namespace)
    _check_options(options)
    if options.base_url is not None:
        _check_url(typed)
    metrics = _metrics(namespace, typed, options)
    notices = _notices(typed, options, metrics)
    if notices:
        print(f"without effect: {'; '.join(notices)}", file=sys.stderr, flush=True)
    key = None if options.base_url is None else _key(namespace, environ)
    return BatchRequest(namespace.input_file, namespace.output_file, options, namespace, typed, metrics, key)


def _check_tables(namespace: argparse.Namespace, typed: Collection[str]) -> None:
    """Remove the ranktable fields from the namespace. Raises ConfigError if one was typed."""
    for name in _TABLES:
        if name in typed:
            raise ConfigError(f"{_flag(name)} is for instances of a cluster: run-batch has one process and no table")
        vars(namespace).pop(name, None)


def _check_options(options: BatchOptions) -> None:
    for name in ("max_inflight", "max_input_bytes", "max_input_lines", "max_line_bytes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{_flag(name)} {value} is out of range: use 1 or more")
    limit_s = options.request_timeout
    if limit_s is not None and not 0 < limit_s < math.inf:
        raise ConfigError(f"--request-timeout {limit_s:g} is out of range: use a number of seconds above 0")
    if options.max_inflight is not None and options.max_inflight > MAX_INFLIGHT:
        raise ConfigError(f"--max-inflight {options.max_inflight} is above {MAX_INFLIGHT}")


def _check_url(typed: Collection[str]) -> None:
    """Raise ConfigError for flags that only the server's operator can set."""
    declared = (*dataclasses.fields(EngineOptions), *dataclasses.fields(SchedulerOptions))
    for field in declared:
        if field.name in typed and field.name not in _WITH_URL:
            raise ConfigError(f"{_flag(field.name)} is set by the server at --base-url: leave it out")


def _metrics(namespace: argparse.Namespace, typed: Collection[str], options: BatchOptions) -> tuple[str, int] | None:
    """Return host and port of --metrics-port, or of vLLM's --enable-metrics."""
    host = str(namespace.host if "host" in typed else namespace.url if "url" in typed else "127.0.0.1")
    port = options.metrics_port
    if port is None and options.enable_metrics:
        port = namespace.port if "port" in typed else METRICS_PORT
    if port is None:
        return None
    if not 0 < port < 65536:
        raise ConfigError(f"the port of the metrics, {port}, is not in 1..65535")
    return host, port


def _notices(typed: Collection[str], options: BatchOptions, metrics: tuple[str, int] | None) -> list[str]:
    """Return the typed flags without effect, each with its reason."""
    given = [f"{_flag(name)} (no HTTP server runs here)" for name in _SERVERS if name in typed]
    if options.base_url is not None:
        given = []  # --api-key and --api-key-file are used; the other flags of _SERVERS were refused
    where = [_flag(name) for name in ("host", "url", "port") if name in typed]
    if metrics is None and where:
        given.append(f"{', '.join(where)} (metrics are served only with --metrics-port or --enable-metrics)")
    return given


def _key(namespace: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """Return the API key from --api-key, --api-key-file or the environment. Raises ConfigError for an invalid one."""
    options = from_namespace(SchedulerOptions, namespace)
    read_keys(options, {})
    if options.api_key:
        return options.api_key[0]
    if options.api_key_file is not None:
        return Path(options.api_key_file).read_text(errors="replace").split()[0]
    read_keys(SchedulerOptions(), environ)
    return own_key(environ)


def _as_typed(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
