"""One living process per table entry and host: an abstract Unix socket, whose name a second process cannot bind.

The name includes the table's digest, which distinguishes clusters; a process whose table changes binds another name.

The kernel frees the name when the process dies, however it dies; nothing is written to disk.
"""

import hashlib
import os
import socket
import struct

from wire.errors import ConfigError

_PEER_TIMEOUT_S = 2.0


_MAX_TABLES = 8


class EntryLock:
    """Holds a table entry for this process. Raises ConfigError, naming both processes, if another process holds it."""

    def __init__(self, table_digest: str, server_ip: str, device_ids: tuple[str, ...]) -> None:
        self._server_ip, self._device_ids = server_ip, device_ids
        self._sockets: dict[str, socket.socket] = {}
        self.hold(table_digest)

    def hold(self, table_digest: str) -> None:
        """Hold the entry under this table's digest too; of more than _MAX_TABLES digests, release the oldest.

        Raises ConfigError as at the start.
        """
        if table_digest in self._sockets:
            return
        devices = ",".join(self._device_ids)
        name = _name(f"{table_digest}|{self._server_ip}|{devices}")
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            held.bind(name)
            held.listen()
        except OSError as error:
            held.close()
            raise ConfigError(
                f"table entry server_ip {self._server_ip} devices {devices}: process {os.getpid()} claims it, "
                f"and process {_read_holder(name)} on this host holds it; give each process its own local table"
            ) from error
        self._sockets[table_digest] = held
        while len(self._sockets) > _MAX_TABLES:
            self._sockets.pop(next(iter(self._sockets))).close()

    def close(self) -> None:
        """Release the entry."""
        for held in self._sockets.values():
            held.close()
        self._sockets.clear()


def _name(entry: str) -> bytes:
    return b"\0pdserve-entry-" + hashlib.sha256(entry.encode()).hexdigest()[:32].encode()


def _read_holder(name: bytes) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PEER_TIMEOUT_S)
        try:
            probe.connect(name)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return "(unknown)"
    return str(struct.unpack("3i", credentials)[0])
