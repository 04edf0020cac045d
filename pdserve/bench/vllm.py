"""vLLM's CPU build as a contestant: one engine in its own process group, paused while others are measured."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdserve import parent_death
from pdserve.bench.cases import BenchRun
from pdserve.bench.pd.contestants import kept

_SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "vllm_peer.py"  # exists in a clone only
_START_S, _RUN_S, _END_S = 600.0, 900.0, 20.0


class PeerMissing(Exception):
    """The peer is missing, has ended or sends nothing; the message says how to install it, or where its log is."""


class Vllm:
    """Runs benchmarks/peers/vllm_peer.py in the environment made by benchmarks/peers/setup."""

    name = "vllm"

    def __init__(self, model: Path, *, dtype: str, environ: Mapping[str, str] = os.environ) -> None:
        """Start the peer and wait until its model is loaded. Raises PeerMissing."""
        if not _SCRIPT.is_file():
            raise PeerMissing("--peer vllm needs a clone of the repository, with benchmarks/peers in it")
        home = peers_home(environ)
        python = home / "vllm" / "bin" / "python"
        if not python.exists():
            raise PeerMissing(f"{python} does not exist: run benchmarks/peers/setup vllm, or set PEERS_HOME")
        self.log = home / "vllm-rates.log"
        self._buffer = b""
        self._replies, theirs = os.pipe()
        held, self._guard_pipe = os.pipe()  # closes if we are killed: the guard then kills a paused peer
        keeper = kept(
            sorted(os.sched_getaffinity(0)), [str(python), "-u", str(_SCRIPT), str(model), dtype, str(theirs)]
        )
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                keeper, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, pass_fds=[theirs, held],
                env={**_environment(environ), parent_death.VARIABLE: str(held)}, start_new_session=True,
            )  # fmt: skip
        for descriptor in (theirs, held):
            os.close(descriptor)
        try:
            self.version = str(self._reply(_START_S)["version"])
        except BaseException:  # Ctrl-C too, which does not reach the peer's session
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def bound_to(self) -> str:
        """The cores it uses, from its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in lines if "core ids" in line.lower()), "not in its log")

    def time(self, run: BenchRun) -> float:
        """Return the seconds of one run. Raises PeerMissing if the peer has ended or takes too long."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        request = {"requests": run.requests, "prompt": run.prompt, "out": run.out}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        seconds = float(self._reply(_RUN_S)["seconds"])
        self._signal(signal.SIGSTOP)
        return seconds

    def close(self) -> None:
        """Kill the whole process group."""
        self._signal(signal.SIGKILL)
        self._process.wait(_END_S)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        for descriptor in (self._replies, self._guard_pipe):
            os.close(descriptor)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._replies, 4096) if ready else b""
            if not piece:
                raise PeerMissing(f"vLLM {'ended' if ready else f'sent nothing for {timeout_s:g} s'}: see {self.log}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply


def peers_home(environ: Mapping[str, str]) -> Path:
    """Return the install folder of benchmarks/peers/setup: $PEERS_HOME, else a folder in the user's cache."""
    if environ.get("PEERS_HOME"):
        return Path(environ["PEERS_HOME"])
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    return Path(cache) / "pdserve-peers"


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that lets vLLM use all of our cores: by default it reserves one for its front end."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    own = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
    }  # fmt: skip
    return {**{name: value for name, value in environ.items() if name != "PYTHONPATH"}, **own}
