"""The flags of `pdserve bench serve`, with vLLM's names where they exist."""

import argparse
import base64
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from flags.options import add_flags, flag, from_namespace
from pdserve.bench.load.plot import require_plot
from pdserve.bench.load.random_requests import RequestSizes
from pdserve.bench.load.summary import GOALS, METRICS
from pdserve.bench.serve_vllm_flags import settle
from pdserve.flags.parser import CommandParser
from wire.errors import ConfigError

BACKENDS = ("openai", "vllm", "openai-chat", "openai-embeddings")
_OF_VECTORS = {"e2el", "client_queue_time"}
_METRICS, _POOLED_METRICS = ("ttft", "tpot", "itl", "e2el", "longest_gap"), ("e2el",)
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
EPILOG = """\
examples:
  pdserve bench serve --random-input-len 256 --random-output-len 64 --ignore-eos --num-prompts 100
                                                   the cluster on port 9000, all requests at once
  pdserve bench serve --request-rate 3 --goodput ttft:200 tpot:50 --num-prompts 200
                                                   Poisson arrivals, and how many requests are fast enough
  pdserve bench serve --max-concurrency 8 --backend openai-chat --save-result --plot run.svg
                                                   eight chats at a time, figures as JSON, and a plot
  pdserve bench serve --base-url https://llm.example --dataset-name custom --dataset-path prompts.jsonl
                                                   lines {"prompt": "...", "output_tokens": 64} to another server

A key is read from $PDSERVE_API_KEY, $VLLM_API_KEY or $OPENAI_API_KEY. Ctrl-C prints the results so far.
"""


def _parse_percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(",") if part)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a list of percentiles: write 50,90,99") from error
    if not values or not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"{text!r}: percentiles must be from 0 to 100")
    return values


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Flags of `bench serve`."""

    backend: str = flag("openai", "API to use: completions, chat or vectors", choices=BACKENDS)
    base_url: str = flag("", "URL of the server (default: http://HOST:PORT)")
    host: str = flag("127.0.0.1", "host of the server, without --base-url")
    port: int = flag(9000, "port of the server, without --base-url", parse=int)
    endpoint: str = flag("", "path of the route (default: the backend's)")
    model: str = flag("", "served name of the model (default: the first of /v1/models)")
    served_model_name: str = flag("", "the served name, if --model is the name for the result")
    tokenizer: str = flag("", "name of the tokenizer in the result; none is needed (default: the model)")
    dataset_name: str = flag("random", "source of prompts", choices=("random", "custom", "sharegpt"))
    dataset_path: str = flag("", "file for --dataset-name custom (JSON lines) or sharegpt")
    num_prompts: int = flag(1000, "requests", parse=int)
    input_len: int | None = flag(None, "the same as --random-input-len", parse=int)
    output_len: int | None = flag(None, "the same as --random-, --custom- or --sharegpt-output-len", parse=int)
    random_input_len: int = flag(1024, "tokens per prompt", parse=int)
    random_output_len: int = flag(128, "tokens per answer", parse=int)
    random_range_ratio: float = flag(0.0, "lengths vary uniformly by up to this share", parse=float)
    random_prefix_len: int = flag(0, "tokens of a prefix common to all prompts", parse=int)
    vocab_size: int | None = flag(
        None, "random prompts use token ids of at least 100 and less than this (default: from the model's config.json "
        "if /v1/models gives a local folder, else 1000)", parse=int,
    )  # fmt: skip
    custom_output_len: int | None = flag(None, "tokens of an answer if its line gives none (default: 256)", parse=int)
    sharegpt_output_len: int | None = flag(None, "tokens of an answer (default: as many as the file's)", parse=int)
    request_rate: float = flag(math.inf, "requests per second; inf: all at once", parse=float)
    burstiness: float = flag(
        1.0, "burstiness of arrivals: 1 is Poisson, less is burstier, more is more regular", parse=float
    )
    max_concurrency: int | None = flag(None, "maximum requests in flight (default: no limit)", parse=int)
    num_warmups: int = flag(0, "unmeasured requests before the load", parse=int)
    ignore_eos: bool = flag(False, "generate answers to their full length")
    temperature: float = flag(0.0, "temperature of every request", parse=float)
    top_p: float | None = flag(
        None, "top_p of every request; this and the following flags default to the server's", parse=float
    )
    top_k: int | None = flag(None, "", parse=int)
    min_p: float | None = flag(None, "", parse=float)
    frequency_penalty: float | None = flag(None, "", parse=float)
    presence_penalty: float | None = flag(None, "", parse=float)
    repetition_penalty: float | None = flag(None, "", parse=float)
    logprobs: int | None = flag(None, "log probabilities at each token (default: none)", parse=int)
    extra_body: str = flag("", "JSON object with fields for every request")
    request_timeout: float = flag(600.0, "seconds after which an incomplete request fails", parse=float)
    ready_check_timeout_sec: int = flag(0, "seconds to wait for the server before the load", parse=int)
    disable_shuffle: bool = flag(False, "use a file's conversations in order")
    seed: int = flag(0, "seed of prompts, lengths and arrivals", parse=int)
    goodput: tuple[str, ...] = flag((), f"NAME:MS limits of a good request, for {', '.join(GOALS)}", many=True)
    percentile_metrics: tuple[str, ...] = flag(
        (), f"metrics to report, from {', '.join(METRICS)} (default: {','.join(_METRICS)}; for vectors e2el)", many=True
    )
    metric_percentiles: tuple[float, ...] = flag(
        (50.0, 90.0, 99.0), "percentiles of each metric (default: 50,90,99)", parse=_parse_percentiles
    )
    label: str = flag("", "name of the run in the result (default: the backend)")
    save_result: bool = flag(False, "write the figures as JSON, with vLLM's keys")
    save_detailed: bool = flag(False, "include each request's times, lengths, text and error")
    result_dir: str = flag("", "folder of the JSON file (default: the current one)")
    result_filename: str = flag("", "name of the JSON file (default: LABEL-RATEqps-MODEL-DATE.json)")
    append_result: bool = flag(False, "append to the file, one JSON object per line")
    plot: str = flag("", "plot requests, tokens per second and latencies to this .svg or .png")
    disable_tqdm: bool = flag(False, "show no progress line")
    header: tuple[str, ...] = field(default=(), repr=False)
    metadata: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """The server's URL without a trailing /v1, user and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return _split_user(self.base_url or f"http://{host}:{self.port}")[0].rstrip("/").removesuffix("/v1")

    @property
    def shape(self) -> RequestSizes:
        """The sizes of random requests. Raises ConfigError."""
        return RequestSizes(
            self.random_input_len if self.input_len is None else self.input_len,
            self.random_output_len if self.output_len is None else self.output_len,
            self.random_range_ratio,
            self.random_prefix_len,
        )

    @property
    def is_pooled(self) -> bool:
        """Whether responses are vectors, without tokens."""
        return self.backend == "openai-embeddings"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics to report."""
        return self.percentile_metrics or (_POOLED_METRICS if self.is_pooled else _METRICS)

    @property
    def goals(self) -> dict[str, float]:
        """Milliseconds by metric. Raises ConfigError."""
        return dict(map(_parse_goal, self.goodput))

    @property
    def headers(self) -> dict[str, str]:
        """The headers from --header, and the user and password of --base-url. Raises ConfigError."""
        given, user = _parse_pairs("--header", self.header), _split_user(self.base_url)[1]
        if not user or any(name.lower() == "authorization" for name in given):
            return given
        return {**given, "Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}

    @property
    def requested_model(self) -> str:
        """The given served name, "" for the server's first."""
        return self.served_model_name or self.model

    @property
    def sampling_fields(self) -> dict[str, Any]:
        """The sampling fields of every text request."""
        sampling: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.ignore_eos:
            sampling["ignore_eos"] = True
        if self.logprobs is not None:
            is_chat = self.backend == "openai-chat"
            sampling |= {"logprobs": True, "top_logprobs": self.logprobs} if is_chat else {"logprobs": self.logprobs}
        return sampling

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The fields of --extra-body. Raises ConfigError."""
        try:
            fields = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise ConfigError(f"--extra-body {self.extra_body}: invalid JSON ({error})") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"--extra-body {self.extra_body}: not a JSON object")
        return fields


def parse(argv: Sequence[str]) -> ServeOptions:
    """Parse the command line. Raises ConfigError."""
    parser = CommandParser(
        prog="pdserve bench serve",
        usage="pdserve bench serve [flags]",
        description="Send a load to an OpenAI server; print TTFT, TPOT, gaps, goodput and rates.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, ServeOptions, "bench serve")
    for name, what in (("--header", "sent with every request"), ("--metadata", "put into the result")):
        parser.add_argument(
            name, nargs="+", action="extend", metavar="KEY=VALUE", default=argparse.SUPPRESS, help=what
        )  # fmt: skip
    arguments, notice = settle(argv)
    if notice:
        print(notice, file=sys.stderr, flush=True)
    namespace = parser.parse_args(arguments)
    for name in ("header", "metadata"):
        if name in namespace:
            setattr(namespace, name, tuple(getattr(namespace, name)))
    return check(from_namespace(ServeOptions, namespace))


def check(options: ServeOptions) -> ServeOptions:
    """Return the options. Raises ConfigError, with the value and the limit."""
    for name, minimum in (("num_prompts", 1), ("max_concurrency", 1), ("num_warmups", 0), ("request_timeout", 1)):
        value = getattr(options, name)
        if value is not None and not value >= minimum:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be at least {minimum}")
    if not options.url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {options.url}: it must begin with http:// or https://")
    _check_port(options.url)
    if "?" in options.url or "#" in options.url:
        raise ConfigError("--base-url has a query: pass only the server, and a key with --header")
    for name in options.metrics:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics {name}: choose from {', '.join(METRICS)}")
    if options.is_pooled and (lacking := {*options.metrics, *options.goals} - _OF_VECTORS):
        raise ConfigError(f"--backend {options.backend}: vectors have no {', '.join(sorted(lacking))}, only e2el")
    if (options.dataset_name == "random") == bool(options.dataset_path):
        problem = "random prompts need no --dataset-path" if options.dataset_path else "it needs --dataset-path FILE"
        raise ConfigError(f"--dataset-name {options.dataset_name}: {problem}")
    if options.dataset_path and not Path(options.dataset_path).exists():
        raise ConfigError(f"--dataset-path {options.dataset_path} does not exist")
    _ = options.shape
    if options.plot:
        require_plot(options.plot)
    _ = options.goals, options.headers, options.extra_fields, _parse_pairs("--metadata", options.metadata)
    return options


def _check_port(url: str) -> None:
    try:
        port = urlsplit(url).port
    except ValueError:
        port = 0
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"{url}: the port is not a number from 1 to 65535")


def _split_user(url: str) -> tuple[str, str]:
    """Return a URL without user and password, and the user and password."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    authority, slash, path = rest.partition("/")
    user, _, host = authority.rpartition("@")
    return f"{scheme}{mark}{host}{slash}{path}", unquote(user)


def _parse_goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    try:
        value = float(limit)
    except ValueError as error:
        raise ConfigError(f"--goodput {text}: write NAME:MILLISECONDS, such as ttft:200") from error
    if name not in GOALS or not value >= 0:
        raise ConfigError(f"--goodput {text}: NAME must be one of {', '.join(GOALS)}, and the time at least 0 ms")
    return name, value


def _parse_pairs(name: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{name} takes KEY=VALUE, but a value has no {'=' if not equals else 'KEY'}")
        pairs[key.strip()] = value.strip()
    return pairs
