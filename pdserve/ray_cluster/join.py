"""Find out whether there is a Ray cluster at an address that takes us, within a deadline: Ray's own is long."""

import re
import socket
import subprocess
import sys
from typing import Any

from pdserve.ray_cluster.address import AUTO, split
from wire.errors import ConfigError

_DIAL_S = 5.0
_HEALTH_S = 45.0
_MOST_CHARS = 400
_FAILED_CHECK = re.compile(r"Check failed: (?:[^ ]+ (?:[|&]{2} [^ ]+ )*)?(.+)")


def load() -> Any:
    """Return the package ray. Raises ConfigError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--ray needs Ray: pip install 'pdserve[ray]' ({error})") from error
    return ray


def check_reachable(address: str, timeout_s: float = _HEALTH_S) -> None:
    """Ask the cluster in a process of its own, which can be ended. Raises ConfigError saying what came of it."""
    load()
    if address != AUTO:
        try:
            socket.create_connection(split(address), _DIAL_S).close()
        except OSError as error:
            raise ConfigError(f"--address {address}: nothing answers there: {error}") from error
    where = () if address == AUTO else ("--address", address)
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check", *where]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--address {address}: no Ray cluster answers there within {timeout_s:g} s") from None
    if asked.returncode:
        raise ConfigError(f"--address {address}: no Ray cluster that we can join: {why(asked.stderr or asked.stdout)}")


def why(said: str) -> str:
    """Return what matters of Ray's output: the check that failed, else its last line."""
    failed = _FAILED_CHECK.search(said)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    words = failed[1] if failed else lines[-1] if lines else "it says nothing"
    return words if len(words) <= _MOST_CHARS else words[: _MOST_CHARS - 3] + "..."
