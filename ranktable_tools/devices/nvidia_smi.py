"""Parse the output of nvidia-smi's CSV queries. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NUMBER = re.compile(r"[0-9]{1,12}")
GPU_QUERY = ("--query-gpu=index,uuid,name,driver_version,memory.used,memory.total", "--format=csv,noheader,nounits")
PROCESS_QUERY = ("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; memory in MiB."""

    device_id: str
    uuid: str
    name: str
    driver: str
    used_mib: int | None
    total_mib: int | None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU."""

    uuid: str
    pid: int
    used_mib: int | None
    name: str


def parse_gpus(text: str) -> list[Gpu]:
    """Return the GPUs in the output of `GPU_QUERY`."""
    return [
        Gpu(index, uuid, name, driver, _number(used), _number(total))
        for index, uuid, name, driver, used, total in _rows(text, 6)
        if _number(index) is not None
    ]


def parse_gpu_processes(text: str) -> list[GpuProcess]:
    """Return the processes in the output of `PROCESS_QUERY`."""
    return [
        GpuProcess(uuid, pid, _number(used), name)
        for uuid, pid_text, used, name in _rows(text, 4)
        if uuid.startswith("GPU-") and (pid := _number(pid_text)) is not None
    ]


def _rows(text: str, num_columns: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", num_columns - 1)]
        if len(cells) == num_columns:
            yield cells


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None  # [N/A] if memory is shared
