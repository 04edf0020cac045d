"""Which cluster a command means: the one that was typed, else the one `up` started, else what is on port 9000."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pdserve.client import Client
from pdserve.run_folder import ClusterState, RunFolder, default_run_dir
from wire.errors import ConfigError, Unavailable

DEFAULT_URL = "http://127.0.0.1:9000"
_TIMEOUT_S = 2.0
START_HINT = "`pdserve up --detach` starts a cluster on this machine"
"""Said where nobody listens."""


@dataclass(frozen=True, slots=True)
class TargetCluster:
    """A cluster's address; `state` is what `pdserve up` wrote of it, None where something else started it."""

    base_url: str
    state: ClusterState | None

    @property
    def nothing_there(self) -> str:
        """What to say when nobody answers."""
        return f"nothing answers at {self.base_url}: {START_HINT}, --url http://HOST:PORT names another one's scheduler"


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a cluster."""
    parser.add_argument(
        "--url", help=f"where its scheduler serves (default: the cluster of `pdserve up`, else {DEFAULT_URL})"
    )
    parser.add_argument("--run-dir", help="the folder `up` was given (default: the one it takes by itself)")


def find(url: str | None, run_dir: str | None) -> TargetCluster:
    """Return the cluster that is meant. Raises ConfigError, and Unavailable when the run folder named has none."""
    if url is not None and run_dir is not None:
        raise ConfigError(f"--url {url} and --run-dir {run_dir} both name a cluster: give one of them")
    if url is not None:
        return TargetCluster(base_url(url), None)
    state = RunFolder(Path(run_dir or default_run_dir(os.environ)).absolute()).read()
    if state is not None and state.is_up:
        return TargetCluster(state.base_url, state)
    if run_dir is not None:
        raise Unavailable(f"no cluster of `pdserve up` runs in {run_dir}: `pdserve up --run-dir {run_dir}` starts one")
    return TargetCluster(DEFAULT_URL, None)


def is_scheduler(url: str) -> bool:
    """Return whether a scheduler of ours answers at this base URL, ready or not."""
    try:
        body = Client(url, timeout_s=_TIMEOUT_S).get("/ready").json()
    except Unavailable:
        return False
    return isinstance(body, dict) and isinstance(body.get("ready"), bool) and "instances" in body


def base_url(text: str) -> str:
    """Return what was typed as a base URL, `http://` put in front where it is missing. Raises ConfigError."""
    spelled = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(spelled)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--url {text!r}: {error}") from error
    if parts.scheme != "http" or not host or parts.path not in ("", "/", "/v1", "/v1/"):
        raise ConfigError(f"--url {text!r} is not the address of a scheduler: write http://HOST:PORT")
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{port or 80}"
