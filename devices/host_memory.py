"""Memory available to this process: the host's, or what remains of its cgroup's limit if that is less."""

from pathlib import Path


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes still available. Raises OSError if the system does not report them."""
    lines = meminfo.read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def total_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the total bytes: the host's, or its cgroup's limit if that is less. Raises OSError as above."""
    lines = meminfo.read_text(encoding="ascii").splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    limit = _number(cgroup / "memory.max")
    return total if limit is None else min(total, limit)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
