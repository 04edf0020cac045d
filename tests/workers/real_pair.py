"""A prefill and a decode worker of real vLLM on this machine, with NIXL between them, and `pdserve route`."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from pdserve.client import Client
from pdserve.ports import free_ports
from wire.errors import Unavailable

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
BLOCK_SIZE = 32  # attention of vLLM's CPU build wants multiples of it
START_S = 1800.0  # importing vLLM alone takes minutes on a busy machine
FIRST_ANSWER_S = 300.0  # kernels are compiled then
_POLL_S = 0.1
_ROOT = str(Path(__file__).parents[2])


class RealPair:
    """Owner of the two workers, each a process group: vLLM's engine survives the process that serves HTTP."""

    def __init__(self, program: Sequence[str], folder: Path, model: Path, dtype: str = "float32") -> None:
        self._program, self._folder, self._model, self._dtype = program, folder, model, dtype
        *ports, self.port = free_ports(5)
        self._ports = dict(zip(ROLES, ports[:2], strict=True))
        self._side_ports = dict(zip(ROLES, ports[2:], strict=True))
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._client = httpx.Client(timeout=60.0)  # a new client for each query would cost 0.1 s

    def url(self, role: str) -> str:
        """Return the base URL of a worker."""
        return f"http://127.0.0.1:{self._ports[role]}"

    def start(self, *roles: str) -> None:
        """Start workers, all at once, and return when they listen."""
        for role in roles:
            self._workers[role] = _spawn(self._line(role), self._folder / f"{role}.log", self._environ(role))
        deadline = time.monotonic() + START_S
        for role in roles:
            while not self._is_listening(role):
                assert self._workers[role].poll() is None, self.log(role)
                assert time.monotonic() < deadline, self.log(role)
                time.sleep(_POLL_S)

    def send(self, role: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a worker."""
        os.killpg(self._workers[role].pid, number)
        if number is signal.SIGKILL:
            self._workers[role].wait(60)

    def end(self) -> None:
        """Kill both workers."""
        for worker in self._workers.values():
            _kill(worker)
        self._client.close()

    def gauge(self, role: str, name: str) -> float:
        """Return a metric of a worker, summed over its labels."""
        page = self._client.get(f"{self.url(role)}/metrics").text
        return _sum(page, name)

    def holds_only(self, role: str) -> bool:
        """Return whether a worker holds KV, and runs no request."""
        page = self._client.get(f"{self.url(role)}/metrics").text
        return _sum(page, "vllm:kv_cache_usage_perc") > 0 and not _sum(page, "vllm:num_requests_running")

    def log(self, name: str) -> str:
        """Return the end of a process's log."""
        return (self._folder / f"{name}.log").read_text(errors="replace")[-4000:]

    @contextmanager
    def routed(self, *flags: str) -> Iterator["Routed"]:
        """Run `pdserve route` in front of the pair."""
        urls = [word for role in ROLES for word in (f"--{role}", self.url(role))]
        command = [
            sys.executable, "-P", "-m", "pdserve", "route", *urls, "--served-model-name", "tiny",
            "--port", str(self.port), *flags,
        ]  # fmt: skip
        scheduler = _spawn(command, self._folder / "scheduler.log", os.environ | {"PYTHONPATH": _ROOT})
        try:
            routed = Routed(self, scheduler)
            routed.wait_whole()
            yield routed
        finally:
            _kill(scheduler)

    def _line(self, role: str) -> list[str]:
        transfer = {
            "kv_connector": "NixlConnector", "kv_role": ROLES[role], "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
        }  # fmt: skip
        return [
            *self._program, "serve", str(self._model), "--served-model-name", "tiny", "--host", "127.0.0.1",
            "--port", str(self._ports[role]), "--dtype", self._dtype, "--max-model-len", "2048", "--max-num-seqs", "64",
            "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "128", "--enforce-eager",
            "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip

    def _environ(self, role: str) -> Mapping[str, str]:
        cores = sorted(os.sched_getaffinity(0))
        environ = os.environ | {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(cores[list(ROLES).index(role) % len(cores)]),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_ports[role]),
        }  # fmt: skip
        environ.pop("PYTHONPATH", None)  # our packages are not vLLM's
        return environ

    def _is_listening(self, role: str) -> bool:
        try:
            return httpx.get(f"{self.url(role)}/health", timeout=60.0).status_code == 200
        except httpx.TransportError:
            return False


class Routed:
    """The scheduler in front of a pair."""

    def __init__(self, pair: RealPair, process: "subprocess.Popen[bytes]") -> None:
        self.pair = pair
        self._process = process
        self.client = Client(f"http://127.0.0.1:{pair.port}")

    def has_lost(self) -> bool:
        """Return whether a worker is lost at this moment."""
        return any(one["state"] == "lost" for one in self.client.get("/ready").json()["instances"])

    def wait_whole(self) -> None:
        """Wait until both workers are living and the pair is proven."""
        deadline, ready = time.monotonic() + START_S, None
        while ready is None or not ready["ready"] or ready["missing"]:
            assert self._process.poll() is None, self.pair.log("scheduler")
            assert time.monotonic() < deadline, (ready, self.pair.log("scheduler"))
            time.sleep(_POLL_S)
            try:
                ready = self.client.get("/ready").json()
            except Unavailable:
                ready = None

    async def until_running(self) -> None:
        """Wait until the scheduler runs a request."""
        async with asyncio.timeout(60.0):
            while not self.gauge("pdserve_requests_inflight"):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(_POLL_S)

    def gauge(self, name: str) -> float:
        """Return a metric of the scheduler, summed over its labels."""
        return sum(one.value for one in self.client.metrics() if one.name == name)


def _sum(page: str, name: str) -> float:
    return sum(map(float, re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)))


def warm(pair: RealPair) -> None:
    """Run one hand-off: the first of a process takes long."""
    body = {"model": "tiny", "prompt": list(range(5, 80)), "temperature": 0, "max_tokens": 1}
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    first = _post(pair.url("prefill"), body | {"kv_transfer_params": asked})
    _post(pair.url("decode"), body | {"max_tokens": 4, "kv_transfer_params": first["kv_transfer_params"]})


def _post(url: str, body: Mapping[str, object]) -> dict[str, object]:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=FIRST_ANSWER_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _spawn(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environ, start_new_session=True
        )


def _kill(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(60)
