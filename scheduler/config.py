"""The scheduler's frozen config, built once from flags and environment."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from flags.options import EngineOptions, Parser, add_flags, flag, from_namespace, parse_bytes
from ranktable_tools.addresses import host_problem
from remote_files.addresses import AddressRules
from scheduler.images.image_limits import parse_image_limit
from scheduler.model.overrides import checked_overrides
from scheduler.reasoning.formats import REASONING_FORMATS
from scheduler.request_class import RequestClass, parse_classes
from scheduler.templates.chat_options import CONTENT_FORMATS, ChatSettings, checked_kwargs, parse_kwargs
from scheduler.tools.parsers.registry import CALL_FORMATS
from scheduler.workers.connectors import AUTO, DECODE_FIRST, PATHS
from wire.errors import ConfigError
from wire.shared_limits import MAX_ORPHAN_S
from wire.types import Role

DEFAULT_PORT = 9000


def parse_ports(text: str) -> tuple[int, ...]:
    """Return the ports of `8088,8089`. Raises ConfigError."""
    try:
        ports = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"NODE_PORTS {text!r} is not a comma-separated list of ports, such as 8088,8089") from None
    for port in ports:
        if not 1 <= port <= 65535:
            raise ConfigError(f"NODE_PORTS has {port}: a port is 1..65535")
    return ports


def parse_texts(text: str) -> tuple[str, ...]:
    """Return the texts of `["*"]`, a JSON list, or of a single text. Raises ConfigError."""
    if not text.lstrip().startswith("["):
        return (text,)
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{text[:80]!r} is not a JSON list of strings: {error}") from None
    if not all(isinstance(one, str) for one in given):
        raise ConfigError(f"{text[:80]!r} is not a JSON list of strings")
    return tuple(given)


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Flags of the scheduler only."""

    global_rank_table: str = flag(
        "", "file of the global ranktable (env GLOBAL_RANK_TABLE_FILE_PATH)", env="GLOBAL_RANK_TABLE_FILE_PATH"
    )
    node_ports: tuple[int, ...] = flag(
        (), "ports of the instances in the table's order, such as 8088,8089 (env NODE_PORTS)",
        parse=parse_ports, env="NODE_PORTS",
    )  # fmt: skip
    use_openai: str = flag(
        "1", "1: serve the OpenAI API, 0: /generate like vLLM's first server (env USE_OPENAI)", env="USE_OPENAI"
    )
    connector: str = flag(
        AUTO, "the KV connector of vLLM workers: nixl (NixlConnector), ascend (MooncakeConnectorV1), ascend-layerwise "
        "(MooncakeLayerwiseConnector), nixl-push (NixlPushConnector), mooncake (MooncakeConnector; the last two are "
        "experimental); auto is any with which prefill can precede decode",
        choices=tuple(PATHS),
    )  # fmt: skip
    worker_api_key_file: str | None = flag(None, "file with the key that vLLM workers require (default: none)")
    worker_callback: str | None = flag(
        None, "HOST:PORT at which decode workers call back (--connector ascend-layerwise only; port 0 is a free one; "
        "default: 127.0.0.1:0, for workers on this machine)",
    )  # fmt: skip
    chat_template: str | None = flag(None, "file or text of a chat template (default: the model's)")
    chat_template_content_format: str = flag(
        "auto", "contents as one text, as a list of parts, or as the template expects", choices=CONTENT_FORMATS
    )
    default_chat_template_kwargs: str = flag(
        "", "JSON object of variables for every chat template; a request's take precedence", parse=checked_kwargs
    )
    trust_request_chat_template: bool | None = flag(
        None, "accept chat templates in requests (default: only if no key is set)"
    )
    api_key: tuple[str, ...] = flag(
        (), "an API key that clients must send; may be repeated (env PDSERVE_API_KEY, VLLM_API_KEY). Any user of this "
         "host sees a command line: prefer the variable or --api-key-file",
        secret=True,
    )  # fmt: skip
    api_key_file: str | None = flag(None, "file of keys, one per line, instead of the variables (default: none)")
    protect_metrics: bool = flag(False, "require a key on /metrics too")
    ssl_keyfile: str | None = flag(None, "PEM of the HTTP server's key: HTTPS (default: HTTP)")
    ssl_certfile: str | None = flag(None, "PEM of its certificate and chain (default: none)")
    ssl_ca_certs: str | None = flag(None, "PEM of the CAs that sign clients' certificates (default: none)")
    ssl_cert_reqs: str = flag("0", "clients' certificates: 0 none, 1 optional, 2 required", choices=("0", "1", "2"))
    allowed_origins: tuple[str, ...] = flag((), "origins of pages allowed to call, as a JSON list", parse=parse_texts)
    allowed_methods: tuple[str, ...] = flag(("*",), "methods that pages may use, as a JSON list", parse=parse_texts)
    allowed_headers: tuple[str, ...] = flag(("*",), "headers that pages may send, as a JSON list", parse=parse_texts)
    allow_credentials: bool = flag(False, "pages may send cookies and credentials; needs named origins")
    root_path: str = flag("", "path prefix kept by a reverse proxy, such as /llm (default: none)")
    sse_keep_alive_interval: float | None = flag(
        None, "seconds without an event after which a stream gets a comment (default: never)", parse=float
    )
    otlp_traces_endpoint: str | None = flag(
        None, "URL of the collector for request traces, such as http://localhost:4317 (default: none)"
    )
    startup_timeout: float = flag(600.0, "seconds to wait for the instances at start", parse=float)
    first_token_timeout: float = flag(120.0, "seconds a request may wait for its first token", parse=float)
    stall_timeout: float = flag(10.0, "seconds a request may make no progress", parse=float)
    client_timeout: float = flag(30.0, "seconds a client may take to send its body or to read", parse=float)
    orphan_limit: float = flag(
        30.0, "seconds that a stream with X-Pdserve-Keep-Stream is kept without a client or a scheduler; 0: no "
        "stream is kept",
        parse=float,
    )  # fmt: skip
    shutdown_timeout: float = flag(30.0, "seconds running requests get after SIGTERM; 0: none", parse=float)
    path: str = flag(
        "handoff", "where a prompt runs: on a prefill and a decode instance (handoff), or on both or one of them, "
        "whichever costs least by the measured time of their steps (auto)",
        choices=("auto", "handoff"),
    )  # fmt: skip
    roles: str = flag(
        "fixed", "roles as in the table and by `pdserve role` (fixed), or also changed with the load (auto)",
        choices=("auto", "fixed"),
    )  # fmt: skip
    when_prefill_is_gone: str = flag(
        "fail", "while no prefill instance is living, requests fail, or decode instances serve them alone (local)",
        choices=("fail", "local"),
    )  # fmt: skip
    when_decode_is_gone: str = flag(
        "fail", "while no decode instance is living, requests fail, or prefill instances serve them alone (local)",
        choices=("fail", "local"),
    )  # fmt: skip
    max_queued_requests: int = flag(1000, "maximum waiting requests; further ones get 429", parse=int)
    max_queued_tokens: int = flag(4_000_000, "maximum waiting prompt tokens; further prompts get 429", parse=int)
    ttft_limit: float | None = flag(
        None, "seconds: a request whose first token is expected later gets 429 (default: none does)", parse=float
    )
    request_classes: tuple[str, ...] = flag(
        (), "limits in seconds for classes of requests, such as interactive:ttft=2:gap=0.05 batch:gap=1: each key of "
        "--api-key-file may use those listed after it (KEY CLASS,CLASS), and a request names one in X-Pdserve-Class",
        many=True,
    )  # fmt: skip
    retry_share: float = flag(
        0.2, "maximum concurrent retries while prompts are queued, as a share of active requests", parse=float
    )
    min_retries: int = flag(3, "retries per minute always allowed, whatever the share", parse=int)
    max_body_bytes: int = flag(16 * 2**20, "largest request body; larger get 413", parse=parse_bytes)
    max_answer_bytes: int = flag(
        64 * 2**20, "largest non-streamed answer; larger ones are refused, streams are not limited", parse=parse_bytes
    )
    generation_config: str = flag(
        "vllm",
        "defaults of fields that a request omits: vllm (temperature 1, top_p 1, ...), auto (the model's "
        "generation_config.json), or a folder with one",
    )
    override_generation_config: str | None = flag(None, "JSON whose values override --generation-config's")
    hf_overrides: str | None = flag(
        None, 'to how many dimensions vectors may be cut, as {"matryoshka_dimensions": [256]}, or {"is_matryoshka": '
        "true} for any number (default: what the model's config.json says in this form, else not at all)",
        parse=checked_overrides,
    )  # fmt: skip
    response_role: str = flag("assistant", "role of the answers in chats")
    tool_call_parser: str | None = flag(
        None, "format in which the model writes tool calls, for tool_choice auto (default: the chat template's)",
        choices=tuple(CALL_FORMATS),
    )  # fmt: skip
    reasoning_parser: str | None = flag(
        None, "format in which the model writes its thinking, which answers then have in `reasoning` (default: it is "
        "part of the content)",
        choices=tuple(REASONING_FORMATS),
    )  # fmt: skip
    responses_store: str | None = flag(
        None, "sqlite file in which /v1/responses stores responses, on a local disk (default: none)"
    )
    responses_store_count: int = flag(10_000, "maximum stored responses; the oldest are deleted first", parse=int)
    responses_store_bytes: int = flag(2**30, "maximum bytes of all stored responses", parse=parse_bytes)
    responses_store_ttl: float = flag(30 * 86400.0, "seconds that a response is stored", parse=float)
    max_logprobs: int = flag(20, "maximum log probabilities per position; -1: the whole vocabulary", parse=int)
    return_tokens_as_token_ids: bool = flag(False, "show tokens in log probabilities by id, such as token_id:42")
    enable_prompt_tokens_details: bool = flag(False, "report in usage how many prompt tokens were cached")
    enable_force_include_usage: bool = flag(False, "always put token counts into every chunk of a stream")
    max_n: int = flag(16, "maximum choices per prompt", parse=int)
    max_prompts: int = flag(64, "maximum prompts per request", parse=int)
    max_stop_strings: int = flag(4, "maximum stop strings per request", parse=int)
    max_stop_chars: int = flag(256, "longest stop string", parse=int)
    max_inputs: int = flag(2048, "maximum texts per request for vectors or scores", parse=int)
    limit_mm_per_prompt: int = flag(
        16, 'maximum images of a chat, as image=4 or {"image": 4}; 0 refuses images', parse=parse_image_limit
    )
    max_image_bytes: int = flag(
        512 * 2**20, "maximum bytes of the images of all running requests; further images get 429", parse=parse_bytes
    )
    enable_mm_embeds: bool = flag(
        False, "accept image_embeds in chats: embeddings that clients computed; their content cannot be checked"
    )
    image_fetch_timeout: float = flag(10.0, "seconds that an image at a URL may take to arrive", parse=float)
    allow_private_urls: tuple[str, ...] = flag(
        (), "networks of URLs (images in chats, run-batch's -i and -o) allowed besides public ones, such as "
        "10.0.0.0/8,127.0.0.1/32",
        many=True,
    )  # fmt: skip
    allowed_media_domains: tuple[str, ...] = flag((), "hosts of images at URLs (default: all)", many=True)
    allowed_local_media_path: str | None = flag(
        None, "folder whose images requests may name by file:// URLs (default: none)"
    )
    enable_per_request_metrics: bool = flag(False, "report in answers how long their stages took, in `metrics`")
    enable_request_id_headers: bool = flag(
        False, "send X-Request-Id with the answers of /health, /ready, /ping and /metrics too"
    )
    enable_docs: bool = flag(False, "serve /docs, the API as a page")
    enable_tokenizer_info_endpoint: bool = flag(False, "serve /tokenizer_info, the tokenizer's config")
    enable_dev_routes: bool = flag(
        False, "serve /server_info (the configuration) and /reset_prefix_cache, to every client"
    )

    def may_lack(self) -> frozenset[Role]:
        """Return the roles without which the other one serves alone."""
        chosen = {Role.PREFILL: self.when_prefill_is_gone, Role.DECODE: self.when_decode_is_gone}
        return frozenset(role for role, choice in chosen.items() if choice == "local")

    def classes(self) -> Mapping[str, RequestClass]:
        """Return the classes of requests by name. Raises ConfigError."""
        return parse_classes(self.request_classes)

    def callback_place(self) -> tuple[str, int] | None:
        """Return host and port at which decode workers call back; None where none does. Raises ConfigError."""
        if PATHS[self.connector] != DECODE_FIRST:
            if self.worker_callback is not None:
                raise ConfigError(f"--worker-callback: with --connector {self.connector} no worker calls back")
            return None
        text = self.worker_callback or "127.0.0.1:0"
        found = urlsplit(f"//{text}")
        try:
            host, port = found.hostname or "", found.port
        except ValueError:
            port = None
        if port is None or found.netloc != text:
            raise ConfigError(f"--worker-callback {text} is not HOST:PORT, such as 10.0.0.1:9100")
        problem = host_problem(host)
        if problem is not None:
            raise ConfigError(f"--worker-callback {text}: {problem}")
        return host, port

    def chat_settings(self, *, keyed: bool) -> ChatSettings:
        """Return the settings for chat templates; `keyed`: whether clients need an API key."""
        trusts = self.trust_request_chat_template
        kwargs = parse_kwargs(self.default_chat_template_kwargs)
        return ChatSettings(self.chat_template_content_format, not keyed if trusts is None else trusts, kwargs)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The config of a scheduler process."""

    engine: EngineOptions
    options: SchedulerOptions

    def __post_init__(self) -> None:
        _check(self.engine, self.options)


def parser() -> argparse.ArgumentParser:
    """Return the scheduler's command line."""
    made = Parser(
        prog="scheduler",
        description="The entry point of a cluster: serves the OpenAI API and places each prompt on a prefill and a "
        "decode instance of the global ranktable.",
        epilog="Engine flags are accepted so that one command line fits every role; the scheduler uses only some, "
        "such as --model, --served-model-name, --max-model-len, --host, --port and --log-level.",
    )
    add_flags(made, EngineOptions)
    add_flags(made, SchedulerOptions)
    return made


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> SchedulerConfig:
    """Build the config from `argv` (without the program's name) and `environ`. Raises ConfigError."""
    namespace = parser().parse_args(argv)
    variables = dict(environ or {})
    engine = from_namespace(EngineOptions, namespace, variables)
    if "port" not in namespace:
        engine = dataclasses.replace(engine, port=DEFAULT_PORT)
    return SchedulerConfig(engine, from_namespace(SchedulerOptions, namespace, variables))


def _check(engine: EngineOptions, options: SchedulerOptions) -> None:
    if not engine.model:
        raise ConfigError("--model is missing: pass the model folder")
    if not 0 <= engine.port <= 65535:
        raise ConfigError(f"--port {engine.port} is not a port: 0..65535, 0 for any free one")
    if engine.max_model_len is not None and engine.max_model_len < 2:
        raise ConfigError(f"--max-model-len {engine.max_model_len} is too short: at least 2")
    if options.use_openai not in ("0", "1"):
        raise ConfigError(f"USE_OPENAI={options.use_openai!r}: 1 is the OpenAI API, 0 is /generate")
    if options.orphan_limit > MAX_ORPHAN_S:
        raise ConfigError(f"--orphan-limit {options.orphan_limit:g} is out of range: at most {MAX_ORPHAN_S:g}")
    options.callback_place()
    _check_first_token(options)
    AddressRules.of(options.allow_private_urls)
    folder = options.allowed_local_media_path
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--allowed-local-media-path {folder} is not a folder")
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name == "max_logprobs":
            if value < -1:
                raise ConfigError(f"--max-logprobs {value} is out of range: 0 or more, or -1 for the whole vocabulary")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            may_be_0 = field.name in ("limit_mm_per_prompt", "shutdown_timeout", "orphan_limit")
            if not (value > 0 or (may_be_0 and value == 0)):
                least = "0 or more" if may_be_0 else "more than 0"
                raise ConfigError(f"--{field.name.replace('_', '-')} {value} is out of range: {least}")


def _check_first_token(options: SchedulerOptions) -> None:
    """Raise ConfigError if a limit on the first token is above --first-token-timeout, which ends requests first."""
    limits = {"--ttft-limit": options.ttft_limit}
    limits |= {f"--request-classes {one.name}: ttft": one.ttft_limit_s for one in options.classes().values()}
    most_s = options.first_token_timeout
    for name, limit_s in limits.items():
        if limit_s is not None and limit_s > most_s:
            raise ConfigError(f"{name} {limit_s:g} is more than --first-token-timeout {most_s:g}")
