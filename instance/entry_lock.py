"""One living process per table entry and host: an abstract Unix socket that a second process finds taken.

Its name has the table's digest, which tells clusters apart, so a process that follows its table takes further names.

The kernel frees the name when the process dies, however it dies; nothing lies on disk.
"""

import hashlib
import os
import socket
import struct

from wire.errors import ConfigError

_PEER_TIMEOUT_S = 2.0


_MOST_TABLES = 8


class EntryLock:
    """Holds a table entry for this process. Raises ConfigError naming both processes if another one has it."""

    def __init__(self, table_digest: str, server_ip: str, device_ids: tuple[str, ...]) -> None:
        self._server_ip, self._device_ids = server_ip, device_ids
        self._sockets: dict[str, socket.socket] = {}
        self.hold(table_digest)

    def hold(self, table_digest: str) -> None:
        """Hold the entry by this table too; of many, those held last. Raises ConfigError as at the start."""
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
                f"table entry server_ip {self._server_ip} devices {devices}: process {os.getpid()} presents it, "
                f"and process {_holder(name)} on this host holds it; give each process its own local table"
            ) from error
        self._sockets[table_digest] = held
        while len(self._sockets) > _MOST_TABLES:
            self._sockets.pop(next(iter(self._sockets))).close()

    def close(self) -> None:
        """Let the entry go."""
        for held in self._sockets.values():
            held.close()
        self._sockets.clear()


def _name(entry: str) -> bytes:
    return b"\0pdserve-entry-" + hashlib.sha256(entry.encode()).hexdigest()[:32].encode()


def _holder(name: bytes) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_PEER_TIMEOUT_S)
        try:
            asking.connect(name)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return "(unknown)"
    return str(struct.unpack("3i", credentials)[0])
