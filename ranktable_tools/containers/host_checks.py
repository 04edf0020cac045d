"""Check that a container can run on this host: its cards and its mounts."""

from pathlib import Path

from ranktable_tools.addresses import same_host
from ranktable_tools.containers.cards import require_free
from ranktable_tools.containers.docker import holders
from ranktable_tools.containers.run_line import HCCN_CONF, LOGS, MANAGERS, Container, all_mounts
from ranktable_tools.errors import RanktableError
from ranktable_tools.tables import TableServer


class Host:
    """This machine, and whether it is the member's host."""

    def __init__(self, server: TableServer | None, root: Path = Path("/")) -> None:
        self.address = None if server is None else server.server_ip
        self.is_here = self.address is None or same_host(self.address, "localhost")
        self._root = root

    def has(self, path: str) -> bool:
        """Return whether a path exists."""
        return (self._root / path.lstrip("/")).exists()


def require_ready(container: Container, host: Host) -> None:
    """Raise RanktableError, naming what is missing, if the container cannot be started on this host."""
    if not host.is_here:
        raise RanktableError(f"the table's {container.role} is on {host.address}: run this there")
    # An empty folder for logs is harmless.
    sources = [mount.source for mount in all_mounts(container) if mount.source != LOGS]
    missing = [source for source in sources if not host.has(source)]
    if missing:
        raise RanktableError(f"{', '.join(missing)}: not on this host, and docker would create empty folders")
    if container.has_npus:
        nodes = [*(f"/dev/davinci{device_id}" for device_id in container.device_ids), *MANAGERS]
        absent = [node for node in nodes if not host.has(node)]
        if absent:
            raise RanktableError(f"{', '.join(absent)}: not on this host; `npu-smi info` lists its cards")


def notes_of(container: Container, host: Host, *, share: bool, strict: bool) -> list[str]:
    """Return notes on the command line. Raises RanktableError for a card that another container has.

    If docker cannot be queried, that is a note too, unless `strict`.
    """
    notes = []
    if not host.is_here:
        notes.append(f"this line is for {host.address}; check there whether its cards are free")
    if container.role != "scheduler" and container.kind == "cpu" and not container.guide_exact:
        notes.append("device type cpu: no card is passed (use --device-type npu or cuda for the table's cards)")
    if container.has_npus and not container.with_hccn_conf:
        notes.append(f"there is no {HCCN_CONF} here to mount: links over RoCE cannot find their addresses")
    if host.is_here and container.device_ids and container.kind != "cpu":
        notes += _check_cards(container, share=share, strict=strict)
    return [*notes, f"next: docker exec -it -u ma-user {container.name} /bin/bash"]


def _check_cards(container: Container, *, share: bool, strict: bool) -> list[str]:
    try:
        found = holders()
    except RanktableError as error:
        if strict:
            raise
        return [f"not checked whether another container has the cards: {error}"]
    return require_free(container.kind, container.device_ids, found, share=share)
