"""One living process per table entry and host: an abstract Unix socket that a second process finds taken.

The kernel frees the name when the process dies, however it dies; nothing lies on disk.
"""

import hashlib
import os
import socket
import struct

from wire.errors import ConfigError

_PEER_TIMEOUT_S = 2.0


class EntryLock:
    """Holds a table entry for this process. Raises ConfigError naming both processes if another one has it."""

    def __init__(self, table_digest: str, server_ip: str, device_ids: tuple[str, ...]) -> None:
        entry = f"{table_digest}|{server_ip}|{','.join(device_ids)}"
        name = b"\0pdserve-entry-" + hashlib.sha256(entry.encode()).hexdigest()[:32].encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(name)
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"table entry server_ip {server_ip} devices {','.join(device_ids)}: process {os.getpid()} presents it, "
                f"and process {_holder(name)} on this host holds it; give each process its own local table"
            ) from error

    def close(self) -> None:
        """Let the entry go."""
        self._socket.close()


def _holder(name: bytes) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_PEER_TIMEOUT_S)
        try:
            asking.connect(name)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return "(unknown)"
    return str(struct.unpack("3i", credentials)[0])
