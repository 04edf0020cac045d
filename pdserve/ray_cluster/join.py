"""Check that a Ray cluster at an address accepts us, within a deadline shorter than Ray's own."""

import re
import socket
import subprocess
import sys
from typing import Any

from pdserve.ray_cluster.address import AUTO, split
from wire.errors import ConfigError

_DIAL_S = 5.0
_HEALTH_S = 45.0
_MAX_CHARS = 400
_FAILED_CHECK = re.compile(r"Check failed: (?:[^ ]+ (?:[|&]{2} [^ ]+ )*)?(.+)")


def load() -> Any:
    """Import ray. Raises ConfigError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--ray needs Ray: pip install 'pdserve[ray]' ({error})") from error
    return ray


def check_reachable(address: str, timeout_s: float = _HEALTH_S) -> None:
    """Check the cluster in a separate process with a timeout. Raises ConfigError with the reason."""
    load()
    if address != AUTO:
        try:
            socket.create_connection(split(address), _DIAL_S).close()
        except OSError as error:
            raise ConfigError(f"--address {address}: cannot connect: {error}") from error
    where = () if address == AUTO else ("--address", address)
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check", *where]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--address {address}: no Ray cluster answers there within {timeout_s:g} s") from None
    if done.returncode:
        raise ConfigError(f"--address {address}: cannot join the Ray cluster: {why(done.stderr or done.stdout)}")


def why(output: str) -> str:
    """Return the relevant line of Ray's output: the failed check, else the last line."""
    failed = _FAILED_CHECK.search(output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    line = failed[1] if failed else lines[-1] if lines else "it printed nothing"
    return line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 3] + "..."
