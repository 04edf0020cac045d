"""How many connections the process can open: the soft limit on open files is often only 1,024."""

import resource

from telemetry.logs import EventLogger

_log = EventLogger("scheduler")

WANTED = 65_536
_ENOUGH = 8_192


def raise_open_files() -> int:
    """Raise the soft limit towards WANTED, at most to the hard limit; return it. Warns if it is small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    maximum = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < maximum:
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, hard))
        soft = maximum
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH:
        _log.warning("few_open_files", limit=soft, note="each connection is an open file: raise the hard limit")
    return soft
