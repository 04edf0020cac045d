"""Start and stop the servers that frontdoor.py and route.py measure, their client, and the fake workers they need."""

import argparse
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hop import end, free_ports
from benchmarks.kv.control import ROOT, Child

START_S = 400
_VLLM_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
_SCRIPTS = ROOT / "benchmarks" / "front_door"


def parser_of(description: str | None, cases: Sequence[str], num_sent: str) -> argparse.ArgumentParser:
    """Return a parser of the flags that both benchmarks have; `num_sent`: what --scale is a fraction of."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder whose tokenizer is used (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--only", nargs="+", choices=cases, default=cases, help="default: all")
    parser.add_argument("--scale", type=float, default=1.0, help=f"fraction of the {num_sent} to send (default: 1)")
    parser.add_argument("--flag", action="append", default=[], help="a flag of our scheduler, such as --flag=--sse-x")
    parser.add_argument("--profile", help="file for cProfile's figures of our scheduler; CPU figures are then too high")
    parser.add_argument("--router", help="path of vllm-router")
    return parser


@dataclass(frozen=True, slots=True)
class Server:
    """One server under measurement: where it listens, its process, and the workers behind it (None: its own engine)."""

    name: str
    port: int
    pid: int
    model: str
    workers: Child | None = None

    def pace(self, step_s: float) -> None:
        """Set the step time of the workers behind it."""
        if self.workers is not None:
            self.workers.ask(step_s=step_s)


def start_ours(stack: ExitStack, model: str, flags: Sequence[str], profile: str | None) -> Server:
    """Start our scheduler over two fake instances."""
    workers = start_child(stack, "instances")
    (port,) = free_ports(1)
    command = [sys.executable, str(_SCRIPTS / "front.py"), "--model", model, "--port", str(port)]
    command += ["--prefill", str(workers.ready["prefill"]), "--decode", str(workers.ready["decode"])]
    command += ["--log-level", "WARNING", *(["--profile", profile] if profile else []), *flags]
    return Server("pdserve", port, _ready(stack, command, port, "/ready"), model, workers)


def start_router(stack: ExitStack, program: str) -> Server:
    """Start vllm-router over two fake HTTP workers, a prefill and a decode one."""
    workers = start_child(stack, "http_workers")
    port, metrics = free_ports(2)
    prefill, decode = (f"http://127.0.0.1:{workers.ready[name]}" for name in ("prefill", "decode"))
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    command += ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--policy", "round_robin"]
    command += ["--log-level", "error", "--max-concurrent-requests", "2048"]
    return Server("vllm-router", port, _ready(stack, command, port, "/health"), "fake", workers)


def start_route(stack: ExitStack, model: str, flags: Sequence[str], profile: str | None) -> Server:
    """Start `pdserve route` over two fake HTTP workers, a prefill and a decode one."""
    workers = start_child(stack, "http_workers")
    (port,) = free_ports(1)
    prefill, decode = (f"http://127.0.0.1:{workers.ready[name]}" for name in ("prefill", "decode"))
    command = [sys.executable, "-P", *(["-m", "cProfile", "-o", profile] if profile else []), "-m", "pdserve", "route"]
    command += ["--prefill", prefill, "--decode", decode, "--model", model, "--served-model-name", "fake"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING", *flags]
    command += ["--run-dir", stack.enter_context(tempfile.TemporaryDirectory(prefix="route-"))]
    return Server("pdserve route", port, _ready(stack, command, port, "/ready"), "fake", workers)


def start_vllm(stack: ExitStack, program: str, tokenizer: str) -> Server:
    """Start vLLM's API server, its engine in a separate process, with one tiny layer of random weights."""
    (port,) = free_ports(1)
    model = stack.enter_context(tempfile.TemporaryDirectory(prefix="frontdoor-model-"))
    write_tiny_model(Path(model), Path(tokenizer))
    command = [program, "serve", model, "--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy"]
    command += ["--max-model-len", "8192", "--no-enable-log-requests", "--disable-uvicorn-access-log"]
    command += ["--max-num-seqs", "256", "--enforce-eager"]
    return Server("vLLM API server", port, _ready(stack, command, port, "/health"), model)


def write_tiny_model(folder: Path, tokenizer: Path) -> None:
    """Write a Llama of one small layer without weights, with another model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    config = json.loads((tokenizer / "config.json").read_text())
    small = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps({**config, **small, "num_key_value_heads": 2, "head_dim": 64}))


def start_child(stack: ExitStack, name: str) -> Child:
    """Start a script of this folder: the client or fake workers."""
    child = Child([sys.executable, str(_SCRIPTS / f"{name}.py")])
    stack.callback(child.close)
    return child


def _start(stack: ExitStack, command: Sequence[str]) -> tuple["subprocess.Popen[bytes]", Path]:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="frontdoor-"))
    log, env = Path(folder, "log"), {**os.environ, **_VLLM_ENV}
    with log.open("wb") as output:
        process = subprocess.Popen(list(command), cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
    stack.callback(end, process)
    return process, log


def _ready(stack: ExitStack, command: Sequence[str], port: int, path: str) -> int:
    """Start a server and return its process id once `path` answers 200."""
    process, log = _start(stack, command)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return process.pid
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{command[0]} was not ready within {START_S} s:\n{log.read_text(errors='replace')[-2000:]}")
