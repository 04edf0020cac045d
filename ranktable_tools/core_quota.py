"""The CPU quota of this process's control groups, as a container sets it."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_GROUPS = "sys/fs/cgroup"


def usable_threads(cores: Sequence[int] = (), *, share: float = 1.0, root: Path = Path("/")) -> int:
    """Return the most compute threads for `cores` (empty: all cores of this process) with `share` of the quota.

    A quota is rounded down: a thread with a fraction of a core would delay all others at every barrier.
    """
    num_cores, quota = len(cores) or len(os.sched_getaffinity(0)), core_quota(root)
    return num_cores if quota is None else max(1, min(num_cores, int(quota * share)))


def core_quota(root: Path = Path("/")) -> float | None:
    """Return the smallest CPU limit, in cores, of this process's control groups; None if no group sets a limit.

    It reads cpu.max (version 2), cpu.cfs_quota_us and cpu.cfs_period_us (version 1) of the process's own group and
    its ancestors, below `root`.
    """
    quotas = (quota for group in _groups(root) for quota in (_version_2(group), _version_1(group)))
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the groups' folders; in a container the root of the mount is often the container's own group."""
    mounted = root / _GROUPS
    mounts = {"": [mounted], "cpu": [mounted / "cpu"], "cpu,cpuacct": [mounted / "cpu,cpuacct", mounted / "cpu"]}
    for folders in mounts.values():
        yield from folders
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        parts = [part for part in path.split("/") if part]
        if controllers in mounts and ".." not in parts:  # such a path leads out of the mount
            for depth in range(1, len(parts) + 1):
                yield from (folder.joinpath(*parts[:depth]) for folder in mounts[controllers])


def _version_2(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    return _quota_ratio(quota, period)


def _version_1(group: Path) -> float | None:
    return _quota_ratio(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))


def _quota_ratio(quota: str, period: str) -> float | None:
    """Return quota / period; None for "max", -1 and anything that is not a number."""
    numbers = quota.strip(), period.strip()
    if not all(number.isdecimal() and int(number) for number in numbers):
        return None
    return int(numbers[0]) / int(numbers[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
