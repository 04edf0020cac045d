"""Get the folder of a hub model from a separate download process."""

import os
import subprocess
import sys
from collections.abc import Mapping

from pdserve import parent_death
from pdserve.hub.download_job import DownloadJob, Snapshot
from wire.errors import ConfigError, Unavailable

_FETCH_TIMEOUT_S = 12 * 3600.0  # for all files; the library gives up on a stalled hub within seconds


def find_snapshot(job: DownloadJob, environ: Mapping[str, str]) -> Snapshot:
    """Return the snapshot, downloading it if missing, with progress on stderr.

    The download process dies with us. Raises ConfigError with what to do, Unavailable if the process died.
    """
    held, ours = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pdserve.hub.fetching"], input=job.to_json() + "\n", text=True,
            stdout=subprocess.PIPE, env={**environ, parent_death.VARIABLE: str(held)}, pass_fds=(held,),
            timeout=_FETCH_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"downloading {job} took longer than {_FETCH_TIMEOUT_S / 3600:.0f} h") from error
    finally:
        os.close(held)
        os.close(ours)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise Unavailable(f"downloading {job} ended with exit status {done.returncode}: see its output above")
    return Snapshot.from_json(lines[-1])
