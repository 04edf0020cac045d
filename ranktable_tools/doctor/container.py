"""Check a container: driver and npu-smi are mounted, its cards match the local table, its user may open them."""

import os
from collections.abc import Sequence

from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.doctor.verdict import Verdict, combined, fail, not_here, ok, warn

DRIVER = "/usr/local/Ascend/driver"
_MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
_SMI_PLACES = ("/usr/local/sbin/npu-smi", "/usr/local/bin/npu-smi")
_ASCEND_UID = 1000


def check_container(case: DoctorInput, uid: int | None = None) -> Verdict:
    """Check that the mounts of the guide's `docker run` line exist and that the cards match the local table."""
    machine = case.machine
    if not machine.in_container:
        return not_here("this is not a container")
    if machine.kind != "npu":
        return ok("a container without NPUs")
    own = os.getuid() if uid is None else uid
    problems = [*_check_mounts(machine), *_check_cards(case), *_check_user(machine, own)]
    return combined(problems, f"driver and npu-smi are mounted, cards {','.join(machine.devices)}")


def _check_mounts(machine: Machine) -> Sequence[Verdict]:
    problems = []
    has_smi = machine.tool("npu-smi") is not None or any(machine.path(place).exists() for place in _SMI_PLACES)
    if not machine.path(DRIVER).is_dir():
        problems.append(fail(f"{DRIVER} is not mounted", f"docker run -v {DRIVER}:{DRIVER}"))
    if not has_smi:
        problems.append(fail("npu-smi is not mounted", f"docker run -v {_SMI_PLACES[0]}:{_SMI_PLACES[0]}"))
    absent = [node for node in _MANAGERS if not machine.path(node).exists()]
    if absent:
        step = "docker run " + " ".join(f"--device={node}" for node in absent)
        problems.append(fail(f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not there", step))
    if not machine.path("/etc/hccn.conf").exists():
        message = "/etc/hccn.conf is not mounted: links over RoCE cannot find their addresses"
        problems.append(warn(message, "docker run -v /etc/hccn.conf:/etc/hccn.conf:ro"))
    return problems


def _check_cards(case: DoctorInput) -> Sequence[Verdict]:
    local = case.tables.local
    if local is None:
        return []
    here, wanted = case.machine.devices, local.server.device_ids
    if not wanted:
        return [warn(f"the scheduler's container has the cards {','.join(here)}", "omit its --device flags")]
    if set(here) == set(wanted):
        return []
    message = f"the container has the cards {','.join(here)}, but its local table has {','.join(wanted)}"
    step = "docker run " + " ".join(f"--device=/dev/davinci{device_id}" for device_id in wanted)
    # The same number of cards may be the same cards under other ids; a different number cannot.
    return [warn(message, step) if len(here) == len(wanted) else fail(message, step)]


def _check_user(machine: Machine, uid: int) -> Sequence[Verdict]:
    lines = (machine.text("/etc/passwd") or "").splitlines()
    if not any(line.split(":")[2:3] == [str(uid)] for line in lines):
        step = f"useradd -u {uid} ma-user in the image"
        return [fail(f"uid {uid} has no entry in /etc/passwd: HCCL fails with more than one rank (error 19)", step)]
    if uid not in (0, _ASCEND_UID):
        return [warn(f"uid {uid} may not open the cards, which belong to uid {_ASCEND_UID}", "docker exec -u ma-user")]
    return []
