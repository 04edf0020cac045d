"""Check the cards: those of the tables are present, healthy, and not used by other programs."""

from collections.abc import Sequence
from dataclasses import dataclass

from ranktable_tools.devices.npu_smi import parse_processes, parse_states
from ranktable_tools.devices.nvidia_smi import GPU_QUERY, PROCESS_QUERY, parse_gpu_processes, parse_gpus
from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.verdict import Verdict, combined, counted, fail, not_here, ok, warn

_NO_CARDS = "no cards: instances on this machine compute on its CPU cores"
_MOUNT = "install the driver; in a container mount npu-smi and /usr/local/Ascend/driver"


@dataclass(frozen=True, slots=True)
class CardUser:
    """A process on a card; `pid` is its id in this machine's /proc, None if unknown."""

    device_id: str
    name: str
    pid: int | None
    memory_mb: int | None


def check_cards(case: DoctorInput) -> Verdict:
    """Check that every card to check has a device node, and that the driver's tool lists cards."""
    machine = case.machine
    if machine.kind == "cpu":
        return not_here(_NO_CARDS)
    absent = [device_id for device_id in case.wanted_devices if device_id not in machine.devices]
    shown = ",".join(machine.devices) or "none"
    if absent:
        mount = f"docker run --device=/dev/davinci{absent[0]}"
        gpus = "check nvidia-smi; in a container, start it with docker run --gpus all"
        step = mount if machine.kind == "npu" else gpus
        return fail(f"the table has the cards {','.join(absent)}, but this host has {shown}", step)
    listed = _list_cards(case)
    if isinstance(listed, Verdict):
        return listed
    return ok(f"{machine.kind} {shown}: {listed}")


def check_card_health(case: DoctorInput) -> Verdict:
    """Check that no card to check has another health than OK; those that npu-smi does not list are left out."""
    if case.machine.kind != "npu":
        return not_here("no NPU on this machine")
    answer = case.machine.run_tool("npu-smi", "info")
    if answer is None:
        return fail("npu-smi is not found", _MOUNT)
    states = {state.device_id: state for state in parse_states(answer.text)}
    if not states:
        return fail(f"npu-smi info: {answer.summary}", "check the driver and the processes on the cards")
    found = [states[device_id] for device_id in case.wanted_devices if device_id in states]
    problems = [
        fail(
            f"card {state.device_id} is {state.health}",
            f"npu-smi info -t health -i {state.npu_id} -c {state.chip_id}",
        )
        for state in found
        if state.health != "OK"
    ]
    return combined(problems, f"{counted(len(found), 'card')} OK")


def check_card_users(case: DoctorInput) -> Verdict:
    """Check that only pdserve uses the cards to check."""
    if case.machine.kind == "cpu":
        return not_here(_NO_CARDS)
    users = _npu_users(case) if case.machine.kind == "npu" else _gpu_users(case)
    if isinstance(users, Verdict):
        return users
    wanted = case.wanted_devices
    others = [user for user in users if user.device_id in wanted and not _is_ours(case, user)]
    problems = [
        warn(f"card {user.device_id} is used by {user.name}{_size(user)}", "stop it, or run gen with other cards")
        for user in others
    ]
    ours = sum(user.device_id in wanted for user in users) - len(others)
    return combined(
        problems, f"{counted(ours, 'process', 'processes')} of pdserve" if ours else "no process uses the cards"
    )


def _list_cards(case: DoctorInput) -> str | Verdict:
    if case.machine.kind == "npu":
        answer = case.machine.run_tool("npu-smi", "info")
        if answer is None:
            return fail("npu-smi is not found", _MOUNT)
        names = [state.name for state in parse_states(answer.text)]
    else:
        answer = case.machine.run_tool("nvidia-smi", *GPU_QUERY)
        if answer is None:
            return fail("nvidia-smi is not found", "install the driver; in a container use the NVIDIA runtime")
        names = [gpu.name for gpu in parse_gpus(answer.text)]
    if not names:
        return fail(f"{' '.join(answer.command)}: {answer.summary}", "check the driver and the processes on the cards")
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _npu_users(case: DoctorInput) -> Sequence[CardUser] | Verdict:
    answer = case.machine.run_tool("npu-smi", "info")
    if answer is None:
        return fail("npu-smi is not found", _MOUNT)
    inside = case.machine.in_container
    return [
        CardUser(user.device_id, user.name, user.container_pid if inside else user.pid, user.memory_mb)
        for user in parse_processes(answer.text)
    ]


def _gpu_users(case: DoctorInput) -> Sequence[CardUser] | Verdict:
    gpus = case.machine.run_tool("nvidia-smi", *GPU_QUERY)
    processes = case.machine.run_tool("nvidia-smi", *PROCESS_QUERY)
    if gpus is None or processes is None:
        return fail("nvidia-smi is not found", "install the driver; in a container use the NVIDIA runtime")
    id_by_uuid = {gpu.uuid: gpu.device_id for gpu in parse_gpus(gpus.text)}
    return [
        CardUser(id_by_uuid.get(user.uuid, user.uuid), user.name, user.pid, user.used_mib)
        for user in parse_gpu_processes(processes.text)
    ]


def _is_ours(case: DoctorInput, user: CardUser) -> bool:
    return user.pid is not None and "pdserve" in (case.machine.text(f"/proc/{user.pid}/cmdline") or "")


def _size(user: CardUser) -> str:
    pid = "" if user.pid is None else f"pid {user.pid}"
    memory = "" if user.memory_mb is None else f"{user.memory_mb} MB"
    details = ", ".join(part for part in (pid, memory) if part)
    return f" ({details})" if details else ""
