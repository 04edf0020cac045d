"""The guide's names of table files."""

MERGED_GLOBAL = "global_ranktable_merge.json"
MERGED_LOCAL = "local_ranktable_merge.json"
HOST = ("host",)


def global_name(ip: str) -> str:
    """Return the name of a host's global table."""
    return f"global_ranktable_{ip}.json"


def local_name(ip: str, device_ids: tuple[str, ...], port: int | None = None) -> str:
    """Return the name of an instance's local table, with its ids concatenated, or, with `HOST`, the scheduler's.

    The guide's names have no port. A port distinguishes two instances that share all their devices.
    """
    return f"local_ranktable_{ip}_{''.join(device_ids)}{'' if port is None else f'_{port}'}.json"
