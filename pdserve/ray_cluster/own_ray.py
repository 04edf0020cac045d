"""A private Ray cluster for `up --ray` without --address: on this machine, on loopback only, with its own token."""

import os
import secrets
from collections.abc import MutableMapping
from typing import Any

from pdserve.ray_cluster.private_folder import PrivateFolder
from ranktable_tools.json_file import write_private

_OBJECT_STORE_BYTES = 100 * 2**20  # Ray's minimum is 75 MiB; pdserve stores nothing there
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's switch for systems without cluster support: it then listens on 127.0.0.1 only."""


class OwnRay:
    """Owns a private folder with Ray's sockets, logs, and the token that every request to it needs."""

    def __init__(self) -> None:
        self._folder = PrivateFolder()

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Set the variables that Ray reads on import and when its processes start."""
        token = self._folder.path / "token"
        write_private(token, secrets.token_hex(32))
        environ.update(LOOPBACK_ONLY)
        environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"})
        environ.pop("RAY_AUTH_TOKEN", None)

    def arguments(self, num_cpus: int) -> dict[str, Any]:
        """Return the arguments of `ray.init`: the CPUs that the instances need, or the machine's if it has more."""
        return {
            "address": "local",
            "num_cpus": max(num_cpus, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": str(self._folder.path / "r"),  # Ray makes it world-readable; its parent is private
        }

    def close(self) -> None:
        """Delete the folder."""
        self._folder.close()
