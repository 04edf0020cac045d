"""Find the cluster for a command: the given one, else the one `up` started, else the one on port 9000."""

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
"""Advice if nothing listens."""


@dataclass(frozen=True, slots=True)
class TargetCluster:
    """A cluster's address; `state` was written by `pdserve up`, None if something else started it."""

    base_url: str
    state: ClusterState | None

    @property
    def nothing_there(self) -> str:
        """The error message if there is no response."""
        return (
            f"nothing answers at {self.base_url}: {START_HINT}, or pass another scheduler with --url http://HOST:PORT"
        )


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select a cluster."""
    parser.add_argument("--url", help=f"the scheduler's URL (default: the cluster of `pdserve up`, else {DEFAULT_URL})")
    unset = "default: $PDSERVE_RUN_DIR or ~/.local/state/pdserve"
    parser.add_argument("--run-dir", help=f"the run folder given to `up` ({unset})")


def find(url: str | None, run_dir: str | None) -> TargetCluster:
    """Return the selected cluster. Raises ConfigError, and Unavailable if no cluster runs in the given folder."""
    if url is not None and run_dir is not None:
        raise ConfigError(f"--url {url} and --run-dir {run_dir} both select a cluster: use only one")
    if url is not None:
        return TargetCluster(base_url(url), None)
    state = RunFolder(Path(run_dir or default_run_dir(os.environ)).absolute()).read()
    if state is not None and state.is_up:
        return TargetCluster(state.base_url, state)
    if run_dir is not None:
        raise Unavailable(f"no cluster of `pdserve up` runs in {run_dir}: `pdserve up --run-dir {run_dir}` starts one")
    return TargetCluster(DEFAULT_URL, None)


def is_scheduler(url: str) -> bool:
    """Return whether a pdserve scheduler answers at this base URL, ready or not."""
    try:
        body = Client(url, timeout_s=_TIMEOUT_S).get("/ready").json()
    except Unavailable:
        return False
    return isinstance(body, dict) and isinstance(body.get("ready"), bool) and "instances" in body


def base_url(text: str) -> str:
    """Return `text` as a base URL, with `http://` added if missing. Raises ConfigError."""
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
