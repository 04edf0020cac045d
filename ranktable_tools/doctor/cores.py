"""Check the cores that CPU instances share, and their container's CPU limit."""

from ranktable_tools.core_quota import core_quota
from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.verdict import Verdict, counted, not_here, ok, warn


def check_cores(case: DoctorInput) -> Verdict:
    """Check that this process may use a core for each device id of this host's CPU instances."""
    cores = len(case.machine.cores)
    quota = core_quota(case.machine.root)
    limit = cores if quota is None else min(cores, quota)
    usable = counted(cores, "core") if limit == cores else f"{counted(cores, 'core')} with a quota of {limit:g}"
    if case.machine.kind != "cpu":
        return ok(usable)
    wanted = {device_id for one in case.here for device_id in one.server.device_ids}
    if not wanted:
        return ok(usable) if case.tables.table is None else not_here(f"no instance of the table is here; {usable}")
    if len(wanted) > limit:
        step = "use fewer device ids in the table, or more cores (docker --cpus, taskset)"
        return warn(f"{usable} for {counted(len(wanted), 'device id')}, fewer than one each", step)
    return ok(f"{usable} for {counted(len(wanted), 'device id')}")
