"""Flags declared once: a frozen dataclass per kind of process, from which its argparse flags are generated.

`EngineOptions` are the flags that every process of a cluster accepts, as in the guide: instances use all of them, but
the scheduler only some, such as those for the model, its maximum context length and its served names.
"""

import argparse
import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flags.groups import place_of, rank_of
from wire.errors import ConfigError

T = TypeVar("T")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """Return the bytes of `1073741824`, `512MiB`, `1GiB`, `2GB`. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if not match:
        raise ConfigError(f"{text!r} is not a size: write 1073741824, 512MiB or 1GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def flag(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    env: str | None = None,
    many: bool = False,
    secret: bool = False,
) -> Any:
    """Declare a dataclass field as a flag named like it with dashes; `env` is a variable that also sets it.

    A `secret` is a tuple left out of the repr; its flag may be repeated, and its values are not split at commas.
    """
    metadata = {"help": help, "parse": parse, "choices": choices, "env": env, "many": many, "secret": secret}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


QUANTIZATIONS = ("awq", "gptq", "smoothquant", "compressed-tensors", "fp8", "mxfp4", "modelslim", "ascend", "gguf")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Flags every process of a cluster accepts."""

    model: str = flag("", "model folder, or its name on the hub, such as facebook/opt-125m")
    revision: str | None = flag(None, "branch, tag or commit of a hub model (default: its main branch)")
    download_dir: str | None = flag(None, "folder for models from the hub (default: the hub library's own cache)")
    hub: str | None = flag(
        None, "the hub to get models from (default: huggingface, or modelscope where VLLM_USE_MODELSCOPE is True)",
        choices=("huggingface", "modelscope"),
    )  # fmt: skip
    served_model_name: tuple[str, ...] = flag((), "names clients use (default: --model as typed)", many=True)
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(0, "port to listen on (default: 9000 for a cluster, 8000 for pdserve serve)", parse=int)
    ip: str | None = flag(None, "an instance's address in the table, on which it listens (default: listen on --host)")
    kv_ip: str | None = flag(
        None, "address that an instance's KV links listen on and connect from (default: the table's)"
    )
    dtype: str = flag("auto", "dtype of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = flag(
        "auto", "where the engine runs; auto: an NPU, else a GPU, else the CPU", choices=("auto", "cpu", "cuda", "npu")
    )
    max_model_len: int | None = flag(None, "maximum prompt + output (default: the model's)", parse=int)
    max_num_seqs: int = flag(256, "maximum sequences in one step", parse=int)
    max_num_batched_tokens: int | None = flag(
        None, "maximum tokens in one step (default: the larger of 2048 and --max-model-len)", parse=int
    )
    prefill_chunk_size: int | None = flag(
        None, "maximum prompt tokens in one step (default: 512 on CPUs, 2048 on GPUs and NPUs)", parse=int
    )
    gap_limit: float = flag(
        0.1,
        "longest gap, in seconds, that computing prompts may cause between the tokens of running streams, unless"
        " decoding alone takes longer",
        parse=float,
    )
    tensor_parallel_size: int | None = flag(None, "ranks of an instance (default: one for each device)", parse=int)
    share_devices: bool = flag(False, "let instances of the ranktable share a GPU (never an NPU)")
    rank_timeout: float = flag(10.0, "seconds a step may take: ranks that wait longer for each other exit", parse=float)
    quantization: str | None = flag(
        None,
        "quantisation required of the checkpoint; any other is an error (default: the checkpoint's)",
        choices=QUANTIZATIONS,
    )
    block_size: int | None = flag(None, "tokens in one KV block (default: 16, 128 on NPUs)", parse=int)
    kv_cache_memory: int | None = flag(
        None, "bytes of the KV pool, such as 512MiB or 1GiB (default on CPUs: 1GiB)", parse=parse_bytes
    )
    gpu_memory_utilization: float = flag(0.9, "share of a device's memory to use", parse=float)
    swap_bytes: int = flag(
        2**30, "maximum memory for KV of preempted sequences, such as 512MiB (default: 1GiB)", parse=parse_bytes
    )
    image_cache_bytes: int = flag(
        2**30, "maximum memory for image embeddings, which are reused when an image is repeated (default: 1GiB)",
        parse=parse_bytes,
    )  # fmt: skip
    image_timeout: float = flag(60.0, "seconds that encoding one image may take", parse=float)
    enable_prefix_caching: bool = flag(True, "reuse the KV of a common prefix while it is cached")
    reuse_decoded: bool = flag(True, "reuse the KV of generated tokens too, as the prefix of a chat's next turn")
    attention_backend: str = flag(
        "auto",
        "attention kernels: the device's own, or the reference",
        choices=("auto", "reference", "cpu", "cuda", "npu"),
    )
    enforce_eager: bool = flag(False, "launch decode steps op by op instead of replaying graphs on GPUs and NPUs")
    kv_transport: tuple[str, ...] = flag((), "transports allowed for KV (default: see docs/hand-off.md)", many=True)
    kv_links: int = flag(2, "maximum concurrent links to one peer, for transports that benefit (tcp)", parse=int)
    kv_digests: bool = flag(True, "check the digest of every KV frame, unless both ends of a link turn this off")
    kv_port_range: str | None = flag(None, "ports for KV listeners, such as 20000-20100 (default: any free one)")
    engine: str = flag("torch", "torch, or fake: arithmetic instead of a model, for tests", choices=("torch", "fake"))
    tls_cert: str | None = flag(None, "PEM of this process's certificate for mutual TLS on gRPC (default: none)")
    tls_key: str | None = flag(None, "PEM of the certificate's key (default: none)")
    tls_ca: str | None = flag(None, "PEM of the authority that signed every process's certificate (default: none)")
    http_port: int | None = flag(None, "port for an instance's own /health and /metrics (default: none)", parse=int)
    log_level: str = flag("INFO", "lowest level logged", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    log_format: str = flag("text", "format of log lines", choices=("text", "json"))

    def served_names(self) -> tuple[str, ...]:
        """Return the names a client may use: the served ones, then --model as typed."""
        return tuple(dict.fromkeys((*self.served_model_name, self.model)))


def is_switch(field: "dataclasses.Field[Any]") -> bool:
    """Return whether a flag takes no value but has a `--no-` form; with default None it is neither on nor off."""
    return field.type in (bool, bool | None)


def add_flags(
    parser: argparse.ArgumentParser, options: type[Any], title: str | None = None, without: Collection[str] = ()
) -> None:  # fmt: skip
    """Add the flags of a dataclass to `parser`: under `title` if given, else each in its group.

    Flags that are not passed stay out of the namespace.
    """
    fields = [field for field in dataclasses.fields(options) if field.metadata and field.name not in without]
    if title is None:
        fields.sort(key=lambda field: place_of(field.name)[0])
    groups = {group.title: group for group in parser._action_groups}
    for field in fields:
        name = title or place_of(field.name)[1]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        groups[name].add_argument("--" + field.name.replace("_", "-"), **_argparse_keywords(field))


def _argparse_keywords(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    meta = field.metadata
    default = "" if field.default in (None, (), "") or "(default" in meta["help"] else f" (default: {field.default})"
    kwargs: dict[str, Any] = {"help": meta["help"] + default, "default": argparse.SUPPRESS, "dest": field.name}
    if is_switch(field):
        return kwargs | {"action": argparse.BooleanOptionalAction}
    return kwargs | {
        "type": _as_argument_type(meta["parse"] or str),
        "choices": meta["choices"],
        "nargs": "+" if meta["many"] else None,
        "action": "append" if meta["secret"] else "store",
        "metavar": None if meta["choices"] else field.name.split("_")[-1].upper(),
    }


def _as_argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Turn ConfigError into ArgumentTypeError, so that argparse puts the flag's name before the message."""

    @functools.wraps(parse)
    def parse_named(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_named


def from_namespace(options: type[T], namespace: argparse.Namespace, environ: "dict[str, str] | None" = None) -> T:
    """Build the dataclass: each field is the flag's value, else its environment variable's, else the default."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        meta = field.metadata
        if field.name in namespace:
            value = getattr(namespace, field.name)
            values[field.name] = _split(value) if meta.get("many") else tuple(value) if meta.get("secret") else value
        elif meta.get("env") and environ and meta["env"] in environ:
            values[field.name] = (meta["parse"] or str)(environ[meta["env"]])
    return options(**values)


def _split(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for value in values for part in value.split(",") if part)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError (exit status 2), suggesting the nearest flag for an unknown one.

    Abbreviations are off: they would change meaning with every new flag.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | kwargs)

    def format_help(self) -> str:
        """Return the help, its groups in order."""
        self._action_groups.sort(key=lambda group: rank_of(group.title))
        return super().format_help()

    def error(self, message: str) -> Any:
        """Raise instead of printing usage and exiting."""
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            known = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(unknown[1], known, n=1)
            message = f"unknown flag {unknown[1]}" + (f": did you mean {near[0]}?" if near else "")
        raise ConfigError(message)
