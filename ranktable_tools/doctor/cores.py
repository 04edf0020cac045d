"""Check the cores that CPU instances share, and their container's CPU limit."""

from ranktable_tools.core_quota import core_quota
from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.verdict import Verdict, counted, not_here, ok, warn


def check_cores(case: DoctorInput) -> Verdict:
    """Check that each device id of this host's CPU instances has its own core."""
    cores = len(case.machine.cores)
    quota = core_quota(case.machine.root)
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
