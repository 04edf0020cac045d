"""A Ray of our own, for `up --ray` without --address: on this machine alone, on loopback, with a token of its own."""

import os
import secrets
from collections.abc import MutableMapping
from typing import Any

from pdserve.ray_cluster.private_folder import PrivateFolder
from ranktable_tools.json_file import write_private

_OBJECT_STORE_BYTES = 100 * 2**20  # the least Ray takes is 75 MiB; nothing of ours is stored there
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's switch for systems where it makes no cluster: then its address is 127.0.0.1, and it listens on no other."""


class OwnRay:
    """Owns a private folder: Ray's sockets and logs, and the token without which nobody may ask it anything."""

    def __init__(self) -> None:
        self._folder = PrivateFolder()

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Set what Ray reads when it is imported and when its processes start."""
        token = self._folder.path / "token"
        write_private(token, secrets.token_hex(32))
        environ.update(LOOPBACK_ONLY)
        environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"})
        environ.pop("RAY_AUTH_TOKEN", None)

    def arguments(self, num_cpus: int) -> dict[str, Any]:
        """Return what `ray.init` is told; `num_cpus` is what the instances need, where this machine has fewer."""
        return {
            "address": "local",
            "num_cpus": max(num_cpus, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": str(self._folder.path / "r"),  # which Ray opens to all: ours around it is not
        }

    def close(self) -> None:
        """Take the folder away."""
        self._folder.close()
