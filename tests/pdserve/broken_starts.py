"""Every input that start_servers.sh and `pdserve up` refuse before they start anything, as data."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve import cli, launch
from tests.docs.broken_input import Broken, Command
from tests.ranktable_tools.broken_inputs import with_value
from tests.ranktable_tools.documents import A, B, Document, local, modelarts, server


def _start(arguments: Sequence[str]) -> int:
    """Start a process of a cluster and return its exit status; its stdout is dropped."""
    with contextlib.redirect_stdout(io.StringIO()):
        return launch.main(arguments)


_SERVERS = Command(_start, "pdserve.launch: ")
_UP = Command(cli.main, "pdserve up: ")
_ROUTE = Command(cli.main, "pdserve route: ")
_TABLES: Mapping[str, Document] = {"g.json": modelarts(), "l.json": local(), "host.json": local(server(A))}
_DECODE = {"GLOBAL_RANK_TABLE_FILE_PATH": "g.json", "RANK_TABLE_FILE_PATH": "l.json"}
_SCHEDULER = _DECODE | {"RANK_TABLE_FILE_PATH": "host.json", "NODE_PORTS": "8088,8089"}
_MODEL: Mapping[str, Any] = {
    "config.json": {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 64, "vocab_size": 320, "max_position_embeddings": 512,
    },
    "tokenizer.json": {},
}  # fmt: skip


def _decode(what: str, *words: str, files: Mapping[str, Any] | None = None, **environ: str) -> Broken:
    variables = {name: value for name, value in (_DECODE | environ).items() if value != "unset"}
    typed = ("--model=.", "--port=8089", *words)
    return Broken(what, None, _TABLES if files is None else files, typed, _SERVERS, variables)


def _scheduler(what: str, *words: str, files: Mapping[str, Any] | None = None, **environ: str) -> Broken:
    return _decode(what, *words, files=files, **{**_SCHEDULER, **environ})


TABLES = (
    _decode("no global table is named", GLOBAL_RANK_TABLE_FILE_PATH="unset"),
    _decode("the global table does not exist", GLOBAL_RANK_TABLE_FILE_PATH="gone.json"),
    _decode("the global table is no JSON", files={**_TABLES, "g.json": "{"}),
    _decode("no local table is named", RANK_TABLE_FILE_PATH="unset"),
    _decode("the local table does not exist", RANK_TABLE_FILE_PATH="gone.json"),
    _decode(
        "the local table is not an entry of the global one",
        files={**_TABLES, "l.json": with_value(local(), "server_list.0.device.0.device_id", "5")},
    ),
    _decode("the global table for the local one", RANK_TABLE_FILE_PATH="g.json"),
    _decode("one GPU in two instances", files={**_TABLES, "g.json": modelarts(decode=[server(A, 5, 6)])}),
    _scheduler("scheduler: no port of an instance anywhere", NODE_PORTS="unset"),
    _scheduler("scheduler: fewer ports than instances", NODE_PORTS="8088"),
    _scheduler("scheduler: a port that is not a number", NODE_PORTS="8088,x"),
    _scheduler("scheduler: a port twice on one host", NODE_PORTS="8088,8088", files={
        **_TABLES, "g.json": modelarts(prefill=[server(A, 4, 5)], decode=[server(A, 6, 7)]),
    }),
    _scheduler("scheduler: its own port for an instance on its host", NODE_PORTS="8089,8088", files={
        **_TABLES, "g.json": modelarts(prefill=[server(A, 4, 5)], decode=[server(B, 6, 7)]),
    }),
    _scheduler("scheduler: port 0", "--port=0"),
    _decode("port 0", "--port=0"),
    _scheduler("scheduler: USE_OPENAI is neither 1 nor 0", USE_OPENAI="yes"),
    _decode("a worker of an engine that is not served", PDSERVE_WORKER="sglang"),
    _decode("a worker that the table lists as pdserve's own", PDSERVE_WORKER="vllm"),
)  # fmt: skip

_WORKERS = {**_TABLES, "g.json": modelarts(decode=[server(B, 6, 7, worker="vllm")])}

START_SERVERS = (
    *TABLES,
    _decode("a worker of another engine than the table lists", files=_WORKERS, PDSERVE_WORKER="vllm-ascend"),
    _decode("a worker without the variable that names its engine", files=_WORKERS),
    _decode(
        "a worker whose program does not exist", files=_WORKERS, PDSERVE_WORKER="vllm", PDSERVE_VLLM_COMMAND="/no/vllm"
    ),
    _decode("a typo in a variable", PDSERVE_API_KYE="x"),
    _decode("a model that does not exist", "--model=/nope"),
    _decode("a typo in a flag", "--max-modellen=4096"),
    _decode("a flag of vLLM's that is refused", "--pipeline-parallel-size=2"),
    _decode("a variable that is not set for a value", "--served-model-name="),
    _decode("a value that is none", "--max-num-seqs=many"),
    _decode("a number out of range", "--block-size=0"),
    _decode("another tensor-parallel size than the table's devices", "--tensor-parallel-size=4",
            files={**_TABLES, **_MODEL}),
    _decode("a step shorter than a sequence", "--max-model-len=4096", "--max-num-batched-tokens=2048"),
    _decode("shared devices where they are NPUs", "--share-devices", "--device=npu"),
    _decode("--http-port is --port too", "--http-port=8089", files={**_TABLES, **_MODEL}),
    _decode("a certificate without its key", "--tls-cert=cert.pem"),
    _scheduler("scheduler: a limit of another modality than images", "--limit-mm-per-prompt=video=1"),
    _scheduler("scheduler: a limit of images that is no number", "--limit-mm-per-prompt=image=many"),
    _scheduler("scheduler: no image bytes at all", "--max-image-bytes=0"),
    _scheduler("scheduler: an image folder that does not exist", "--allowed-local-media-path=gone"),
    _scheduler("scheduler: the network of metadata services", "--allow-private-urls=169.254.0.0/16"),
    _scheduler("scheduler: a network that is none", "--allow-private-urls=internal"),
)  # fmt: skip


def _up(what: str, *words: str, files: Mapping[str, Any] | None = None, **environ: str) -> Broken:
    return Broken(what, None, _MODEL if files is None else files, ("up", "--model=.", *words), _UP, environ)


PDSERVE_UP = (
    _up("no decode instance", "--decode=0"),
    _up("more instances than one machine takes", "--prefill=99999"),
    _up("more instances than a Ray cluster takes", "--ray", "--address=10.0.0.18:6379", "--prefill=99999"),
    _up("a Ray cluster without --ray", "--address=10.0.0.18:6379"),
    _up("Ray's client for a cluster", "--ray", "--address=ray://10.0.0.18:10001"),
    _up("restarts below none", "--max-restarts=-1"),
    _up("a port that is none", "--port=70000"),
    _up("port 0", "--port=0"),
    _up("a model that does not exist", "--model=/nope"),
    _up("what it decides itself", "--node-ports=8088,8089"),
    _up("a typo in a flag", "--prefil=2"),
    _up("a variable that is not set for a value", "--host="),
    _up("a folder that is not a model", files={}),
    _up("a length above the model's", "--max-model-len=4096"),
    _up("a KV pool without room for a sequence", "--kv-cache-memory=4096", "--dtype=float32"),
    _up("an invalid size", "--kv-cache-memory=plenty"),
    _up("workers without a vLLM", "--worker=vllm", PDSERVE_VLLM_COMMAND="/no/vllm"),
    _up("workers of an engine that is not served", "--worker=sglang"),
    _up("workers with a flag of pdserve's own engine", "--worker=vllm", "--kv-transport=tcp"),
    _up("workers with a connector of another engine", "--worker=vllm", "--connector=ascend"),
    _up("workers on a Ray cluster", "--worker=vllm", "--ray"),
    _up("flags of workers without workers", "--worker-args=--seed=1"),
    _up("fewer KV ports than ranks", "--kv-transport=tcp", "--kv-port-range=20000-20000"),
)


def _route(what: str, *words: str) -> Broken:
    return Broken(what, None, {}, ("route", "--port=61009", *words), _ROUTE)  # 9000 is often in use


_PAIR = ("--prefill=http://127.0.0.1:9", "--decode=http://127.0.0.1:19")
PDSERVE_ROUTE = (
    _route("no worker", "--model=."),
    _route("no decode worker", "--prefill=http://127.0.0.1:9"),
    _route("a URL that is none", "--combined=127.0.0.1:9"),
    _route("a URL with a path", "--combined=http://127.0.0.1:9/v1"),
    _route("a key in a URL", "--combined=http://user:key@127.0.0.1:9"),
    _route("a worker named twice", *_PAIR, "--combined=http://127.0.0.1:9"),
    _route("a file of keys that does not exist", *_PAIR, "--worker-api-key-file=/nope"),
    _route("workers that do not answer, and no model", *_PAIR),
)

SECTIONS: Mapping[str, tuple[Broken, ...]] = {
    "`start_servers.sh`": START_SERVERS, "`pdserve up`": PDSERVE_UP, "`pdserve route`": PDSERVE_ROUTE,
}  # fmt: skip
