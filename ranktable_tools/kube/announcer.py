"""The sidecar of each member: sends its part to the API server and fetches the table. Only it has the pod's token."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ranktable_tools.json_file import write_private
from ranktable_tools.kube.api import KubeApi
from ranktable_tools.kube.names import PART_FILE, TABLE_FILE, TABLE_KEY

_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class PartOwner:
    """The pod, the folder of its files, and the ConfigMaps of the parts and the table."""

    pod: str
    folder: Path
    parts: str
    table: str


class Announcer:
    """Owns the part sent last and the table written last."""

    def __init__(self, api: KubeApi, member: PartOwner, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._member, self._clock = api, member, clock
        self._sent: str | None = None
        self._sent_at = 0.0
        self._table: str | None = None

    def turn(self) -> list[str]:
        """Send the part if it is new, and every minute; write the table if it is new. Raises KubeError."""
        return [*self._send(), *self._fetch()]

    def leave(self) -> None:
        """Remove the part from the ConfigMap. Raises KubeError."""
        self._api.set_keys(self._member.parts, {self._member.pod: None})

    def _send(self) -> list[str]:
        path = self._member.folder / PART_FILE
        if not path.exists():
            return []
        part, now = path.read_text(encoding="utf-8"), self._clock()
        is_new = part != self._sent
        if is_new or now - self._sent_at >= _AGAIN_S:
            self._api.set_keys(self._member.parts, {self._member.pod: part})
            self._sent, self._sent_at = part, now
        return [f"sent the part of {self._member.pod}"] if is_new else []

    def _fetch(self) -> list[str]:
        table = self._api.config_map(self._member.table).data.get(TABLE_KEY)
        if table is None or table == self._table:
            return []
        path = self._member.folder / TABLE_FILE
        write_private(path, table)
        self._table = table
        return [f"wrote {path}"]
