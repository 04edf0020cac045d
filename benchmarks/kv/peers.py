"""The peers of benchmarks/peers/ as contestants: each moves a number of bytes on request and returns the seconds.

A peer that is not being measured is stopped (SIGSTOP): UCX polls, and would take a core from the measured one.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from benchmarks.kv.control import ROOT, Child, python_child

_PEERS = ROOT / "benchmarks" / "peers"
_IPERF_S = 60.0


class Contestant(Protocol):
    """A process that moves bytes on request."""

    name: str

    def move(self, num_bytes: int, *, verify: bool = False) -> float:
        """Return the seconds of the move."""
        ...

    def close(self) -> None:
        """Stop all processes."""
        ...


class Missing(Exception):
    """A peer is not installed; the message has its name and the command to install it."""


class Copy:
    """A plain copy by one thread, in a separate process."""

    name = "plain copy"

    def __init__(self, max_bytes: int) -> None:
        self._child = python_child("copy_process", str(max_bytes))

    def move(self, num_bytes: int, *, verify: bool = False) -> float:
        """Return the seconds of one copy."""
        return checked(self.name, self._child.ask(bytes=num_bytes, verify=verify), verify=verify)

    def close(self) -> None:
        """End the process."""
        self._child.close()


class PeerProcess:
    """NIXL or Mooncake: a reader and a source process."""

    def __init__(self, name: str, package: str, script: str, max_bytes: int, env: Mapping[str, str]) -> None:
        self.name = name
        python = peers_home() / package / "bin" / "python"
        if not python.exists():
            raise Missing(f"{name} is not installed: benchmarks/peers/setup {package}")
        command = [str(python), str(_PEERS / script), "--max-bytes", str(max_bytes)]
        self._child = Child(command, env={**os.environ, **env})
        self._signal(signal.SIGSTOP)

    def move(self, num_bytes: int, *, verify: bool = False) -> float:
        """Return the seconds of one read."""
        self._signal(signal.SIGCONT)
        try:
            return checked(self.name, self._child.ask(bytes=num_bytes, verify=verify), verify=verify)
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End both processes."""
        self._signal(signal.SIGCONT)
        self._child.close()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._child.ready["pids"]:
            os.kill(pid, number)


class Iperf:
    """iperf3 over loopback: one stream, default settings, one second per round, whatever the number of bytes."""

    name = "iperf3, one stream"

    def __init__(self) -> None:
        program = shutil.which("iperf3")
        if program is None:
            raise Missing("iperf3 is not installed: benchmarks/peers/setup iperf3")
        self._program, self._port = program, free_port()
        self._server = subprocess.Popen(
            [program, "-s", "-B", "127.0.0.1", "-p", str(self._port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def move(self, num_bytes: int, *, verify: bool = False) -> float:
        """Return the seconds that `num_bytes` take at the receiver's bandwidth."""
        command = [
            self._program,
            "-c",
            "127.0.0.1",
            "-p",
            str(self._port),
            "-t",
            "1",
            "-J",
            "--connect-timeout",
            "5000",
        ]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_IPERF_S)
        report = json.loads(ran.stdout)
        if "error" in report:
            raise RuntimeError(f"iperf3: {report['error']}")
        return num_bytes * 8 / float(report["end"]["sum_received"]["bits_per_second"])

    def close(self) -> None:
        """End the server."""
        self._server.terminate()
        self._server.wait(10)


def nixl(max_bytes: int) -> PeerProcess:
    """Return NIXL with UCX's own choice of transports. Raises Missing."""
    return PeerProcess("NIXL, default UCX", "nixl", "nixl_peer.py", max_bytes, {})


def nixl_tcp(max_bytes: int) -> PeerProcess:
    """Return NIXL with UCX_TLS=tcp. Raises Missing."""
    return PeerProcess("NIXL, UCX_TLS=tcp", "nixl", "nixl_peer.py", max_bytes, {"UCX_TLS": "tcp"})


def mooncake(max_bytes: int) -> PeerProcess:
    """Return Mooncake over TCP. Raises Missing."""
    return PeerProcess("Mooncake, TCP", "mooncake", "mooncake_peer.py", max_bytes, {})


def peers_home() -> Path:
    """Return the folder in which benchmarks/peers/setup installs the peers."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PEERS_HOME") or cache / "pdserve-peers")


def checked(name: str, answer: Mapping[str, object], *, verify: bool) -> float:
    """Return the seconds of an answer. Raises RuntimeError if its bytes should be verified and are wrong."""
    if verify and answer["verified"] is not True:
        raise RuntimeError(f"{name} delivered bytes other than those it was given")
    seconds = answer["seconds"]
    assert isinstance(seconds, float)
    return seconds


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
