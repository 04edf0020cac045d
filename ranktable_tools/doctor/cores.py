"""Check the cores that CPU instances share, and the limits of the container around them."""

from ranktable_tools.doctor.case import Case
from ranktable_tools.doctor.verdict import Verdict, counted, not_here, ok, warn


def check_cores(case: Case) -> Verdict:
    """Each device id of this host's CPU instances has a core of its own."""
    cores = len(case.machine.cores)
    quota = core_quota(case.machine.text("/sys/fs/cgroup/cpu.max"))
    limit = cores if quota is None else min(cores, quota)
    usable = counted(cores, "core") if limit == cores else f"{cores} cores, a quota of {limit:g} of them"
    if case.machine.kind != "cpu":
        return ok(usable)
    wanted = {device_id for one in case.here for device_id in one.server.device_ids}
    if not wanted:
        return ok(usable) if case.tables.table is None else not_here(f"no instance of the table is here; {usable}")
    if len(wanted) > limit:
        step = "fewer device ids in the table, or more cores (docker --cpus, taskset)"
        return warn(f"{len(wanted)} device ids share {usable}: they take turns", step)
    return ok(f"{usable} for {counted(len(wanted), 'device id')}")


def core_quota(text: str | None) -> float | None:
    """Return how many cores the content of cgroup v2's cpu.max allows, None where it sets no limit."""
    words = (text or "").split()
    if len(words) != 2 or not all(word.isdigit() for word in words) or words[1] == "0":
        return None
    return int(words[0]) / int(words[1])
