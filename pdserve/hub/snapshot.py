"""The folder of a model that is named as its hub names it: asked of the process that fetches."""

import os
import subprocess
import sys
from collections.abc import Mapping

from pdserve import tether
from pdserve.hub.download_job import DownloadJob, Snapshot
from wire.errors import ConfigError, Unavailable

_FETCH_TIMEOUT_S = 12 * 3600.0  # of all files; a hub that stalls is left by its library within seconds


def find_snapshot(asked: DownloadJob, environ: Mapping[str, str]) -> Snapshot:
    """Return the snapshot, fetched where it is not here. What takes time is told on stderr.

    The process that fetches ends with us. Raises ConfigError with what to do, Unavailable where it died.
    """
    held, ours = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pdserve.hub.fetching"], input=asked.to_json() + "\n", text=True,
            stdout=subprocess.PIPE, env={**environ, tether.VARIABLE: str(held)}, pass_fds=(held,),
            timeout=_FETCH_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"fetching {asked} took longer than {_FETCH_TIMEOUT_S / 3600:.0f} h") from error
    finally:
        os.close(held)
        os.close(ours)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise Unavailable(f"fetching {asked} ended with exit status {done.returncode}: what it said stands above")
    return Snapshot.from_json(lines[-1])
