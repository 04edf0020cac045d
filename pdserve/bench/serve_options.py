"""The flags of `pdserve bench serve`; vLLM's names where it has them."""

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

from pdserve.bench.load.png import require_png
from pdserve.bench.load.random_requests import RequestSizes
from pdserve.bench.load.summary import GOALS, METRICS
from pdserve.bench.serve_vllm_flags import settle
from pdserve.flags.parser import CommandParser
from wire.errors import ConfigError
from wire.options import add_flags, flag, from_namespace

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
                                                   a Poisson stream, and how many requests are fast enough
  pdserve bench serve --max-concurrency 8 --backend openai-chat --save-result --plot run.svg
                                                   eight at a time by chat, figures as JSON, and a picture
  pdserve bench serve --base-url https://llm.example --dataset-name custom --dataset-path prompts.jsonl
                                                   lines {"prompt": "...", "output_tokens": 64} to another server

A key is read from $PDSERVE_API_KEY, $VLLM_API_KEY or $OPENAI_API_KEY. Ctrl-C prints what was measured so far.
"""


def _percents(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(",") if part)
    except ValueError as error:
        raise ConfigError(f"{text!r} are no percentiles: write 50,90,99") from error
    if not values or not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"{text!r}: percentiles are from 0 to 100")
    return values


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Flags of `bench serve`."""

    backend: str = flag("openai", "what to ask: completions, chat or vectors", choices=BACKENDS)
    base_url: str = flag("", "the server (default: http://HOST:PORT)")
    host: str = flag("127.0.0.1", "without --base-url")
    port: int = flag(9000, "without --base-url", parse=int)
    endpoint: str = flag("", "path of the route (default: the backend's)")
    model: str = flag("", "its served name (default: the first of /v1/models)")
    served_model_name: str = flag("", "the same, where --model is what the result calls it")
    tokenizer: str = flag("", "what the result calls the tokenizer; none is needed (default: the model)")
    dataset_name: str = flag("random", "where prompts come from", choices=("random", "custom", "sharegpt"))
    dataset_path: str = flag("", "file of custom (JSON lines) or sharegpt")
    num_prompts: int = flag(1000, "requests", parse=int)
    input_len: int | None = flag(None, "as --random-input-len", parse=int)
    output_len: int | None = flag(None, "as the data set's own output length", parse=int)
    random_input_len: int = flag(1024, "tokens of a prompt", parse=int)
    random_output_len: int = flag(128, "tokens of an answer", parse=int)
    random_range_ratio: float = flag(0.0, "lengths are even over this share below and above", parse=float)
    random_prefix_len: int = flag(0, "tokens before each prompt that all share", parse=int)
    vocab_size: int | None = flag(
        None, "random prompts are of token ids from 100 to below this (default: of the model's config.json where "
        "/v1/models names its folder here, else 1000)", parse=int,
    )  # fmt: skip
    custom_output_len: int | None = flag(None, "tokens of an answer whose line does not say (default: 256)", parse=int)
    sharegpt_output_len: int | None = flag(None, "tokens of an answer (default: the file's, by /tokenize)", parse=int)
    request_rate: float = flag(math.inf, "requests a second; inf: all at once", parse=float)
    burstiness: float = flag(1.0, "of their arrival: 1 Poisson, below burstier, above more regular", parse=float)
    max_concurrency: int | None = flag(None, "most requests under way (default: no limit)", parse=int)
    num_warmups: int = flag(0, "requests before, not measured", parse=int)
    ignore_eos: bool = flag(False, "answers go on to their full length")
    temperature: float = flag(0.0, "of every request", parse=float)
    top_p: float | None = flag(None, "of every request, as the next ones (default: the server's)", parse=float)
    top_k: int | None = flag(None, "", parse=int)
    min_p: float | None = flag(None, "", parse=float)
    frequency_penalty: float | None = flag(None, "", parse=float)
    presence_penalty: float | None = flag(None, "", parse=float)
    repetition_penalty: float | None = flag(None, "", parse=float)
    logprobs: int | None = flag(None, "log probabilities at each token (default: none)", parse=int)
    extra_body: str = flag("", "JSON object whose fields go into every request")
    request_timeout: float = flag(600.0, "seconds until a request without a whole answer has failed", parse=float)
    ready_check_timeout_sec: int = flag(0, "seconds to wait for the server before the load", parse=int)
    disable_shuffle: bool = flag(False, "take a file's conversations in their order")
    seed: int = flag(0, "of prompts, lengths and arrivals", parse=int)
    goodput: tuple[str, ...] = flag((), f"NAME:MS that a good request keeps, of {', '.join(GOALS)}", many=True)
    percentile_metrics: tuple[str, ...] = flag(
        (), f"what is reported, of {', '.join(METRICS)} (default: {','.join(_METRICS)}; of vectors e2el)", many=True
    )
    metric_percentiles: tuple[float, ...] = flag((50.0, 90.0, 99.0), "(default: 50,90,99)", parse=_percents)
    label: str = flag("", "what the result calls the run (default: the backend)")
    save_result: bool = flag(False, "write the figures as JSON, under vLLM's keys")
    save_detailed: bool = flag(False, "with each request's times, lengths, text and error in it")
    result_dir: str = flag("", "folder of the JSON file (default: here)")
    result_filename: str = flag("", "its name (default: LABEL-RATEqps-MODEL-DATE.json)")
    append_result: bool = flag(False, "add to the file, one JSON object a line")
    plot: str = flag("", "draw requests, tokens a second and latencies into this .svg or .png")
    disable_tqdm: bool = flag(False, "no progress line")
    header: tuple[str, ...] = field(default=(), repr=False)
    metadata: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """The server, without the /v1 that clients' base URLs end in, and without user and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return _parted(self.base_url or f"http://{host}:{self.port}")[0].rstrip("/").removesuffix("/v1")

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
        """Whether answers are vectors, which have an end and no tokens."""
        return self.backend == "openai-embeddings"

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is reported."""
        return self.percentile_metrics or (_POOLED_METRICS if self.is_pooled else _METRICS)

    @property
    def goals(self) -> dict[str, float]:
        """Milliseconds by metric. Raises ConfigError."""
        return dict(map(_goal, self.goodput))

    @property
    def headers(self) -> dict[str, str]:
        """What --header says, and the user and password of --base-url. Raises ConfigError."""
        given, user = _pairs("--header", self.header), _parted(self.base_url)[1]
        if not user or any(name.lower() == "authorization" for name in given):
            return given
        return {**given, "Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}

    @property
    def asked_model(self) -> str:
        """The served name that was given, "" for the server's first."""
        return self.served_model_name or self.model

    @property
    def sampling_fields(self) -> dict[str, Any]:
        """What every request for text says of sampling."""
        told: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.ignore_eos:
            told["ignore_eos"] = True
        if self.logprobs is not None:
            is_chat = self.backend == "openai-chat"
            told |= {"logprobs": True, "top_logprobs": self.logprobs} if is_chat else {"logprobs": self.logprobs}
        return told

    @property
    def extra_fields(self) -> dict[str, Any]:
        """What --extra-body says. Raises ConfigError."""
        try:
            fields = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise ConfigError(f"--extra-body {self.extra_body}: no JSON ({error})") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"--extra-body {self.extra_body}: no JSON object")
        return fields


def parse(argv: Sequence[str]) -> ServeOptions:
    """Return the options of a command line. Raises ConfigError."""
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
    words, notice = settle(argv)
    if notice:
        print(notice, file=sys.stderr, flush=True)
    namespace = parser.parse_args(words)
    for name in ("header", "metadata"):
        if name in namespace:
            setattr(namespace, name, tuple(getattr(namespace, name)))
    return check(from_namespace(ServeOptions, namespace))


def check(options: ServeOptions) -> ServeOptions:
    """Return the options. Raises ConfigError, with the value and the limit."""
    for name, least in (("num_prompts", 1), ("max_concurrency", 1), ("num_warmups", 0), ("request_timeout", 1)):
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: at least {least}")
    if not options.url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {options.url}: it begins with http:// or https://")
    _check_port(options.url)
    if "?" in options.url or "#" in options.url:
        raise ConfigError("--base-url has a query: name the server alone, and --header for a key")
    for name in options.metrics:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics {name}: there are {', '.join(METRICS)}")
    if options.is_pooled and (lacking := {*options.metrics, *options.goals} - _OF_VECTORS):
        raise ConfigError(f"--backend {options.backend}: vectors have no {', '.join(sorted(lacking))}, only e2el")
    if (options.dataset_name == "random") == bool(options.dataset_path):
        words = "random prompts need no --dataset-path" if options.dataset_path else "it needs --dataset-path FILE"
        raise ConfigError(f"--dataset-name {options.dataset_name}: {words}")
    if options.dataset_path and not Path(options.dataset_path).exists():
        raise ConfigError(f"--dataset-path {options.dataset_path} is not there")
    _ = options.shape
    if options.plot and not options.plot.endswith((".svg", ".png")):
        raise ConfigError(f"--plot {options.plot}: name a file that ends in .svg or .png")
    if options.plot.endswith(".png"):
        require_png()
    _ = options.goals, options.headers, options.extra_fields, _pairs("--metadata", options.metadata)
    return options


def _check_port(url: str) -> None:
    try:
        port = urlsplit(url).port
    except ValueError:
        port = 0
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"{url}: the port is not a number from 1 to 65535")


def _parted(url: str) -> tuple[str, str]:
    """Return a URL without the user and password before its host, and those."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    authority, slash, path = rest.partition("/")
    user, _, host = authority.rpartition("@")
    return f"{scheme}{mark}{host}{slash}{path}", unquote(user)


def _goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    try:
        value = float(limit)
    except ValueError as error:
        raise ConfigError(f"--goodput {text}: write NAME:MILLISECONDS, as ttft:200") from error
    if name not in GOALS or not value >= 0:
        raise ConfigError(f"--goodput {text}: of {', '.join(GOALS)}, 0 ms or more")
    return name, value


def _pairs(name: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{name} takes KEY=VALUE: one has no {'=' if not equals else 'KEY'}")
        pairs[key.strip()] = value.strip()
    return pairs
