"""Parse the output of npu-smi on A2, A3 and Ascend 950. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_COLUMNS = re.compile(r"\s{2,}|\t+")
_NUMBER = re.compile(r"[0-9]{1,12}")
_FIRST = re.compile(r"[0-9]{1,12}\s+(?![0-9]+$)\S")


@dataclass(frozen=True, slots=True)
class Chip:
    """One line of `npu-smi info -m`: a device's position, and its physical id, which is the ranktable's device_id."""

    npu_id: int
    chip_id: int
    device_id: str
    name: str


@dataclass(frozen=True, slots=True)
class NpuState:
    """One device of `npu-smi info`."""

    device_id: str
    npu_id: int
    chip_id: int
    name: str
    health: str


@dataclass(frozen=True, slots=True)
class NpuProcess:
    """A process on a device; `pid` is the host's, `container_pid` the container's if the tool reports it."""

    device_id: str
    pid: int
    name: str
    memory_mb: int | None
    container_pid: int | None = None


@dataclass(frozen=True, slots=True)
class SuperPod:
    """The output of `-t spod-info`: an A3's position in its super pod."""

    super_device_id: str
    super_pod_id: str


def parse_fields(text: str) -> list[tuple[str, str]]:
    """Return the `Key : value` lines of `-l`, `-t board` or `-t spod-info`, in order."""
    pairs = [line.partition(":") for line in text.splitlines()]
    return [(key.strip(), value.strip()) for key, colon, value in pairs if colon and key.strip()]


def parse_map(text: str) -> list[Chip]:
    """Return the devices of `npu-smi info -m`; management chips (Mcu) and NPUs without a card (-1) are left out."""
    header: list[str] = []
    chips = []
    for line in text.splitlines():
        cells = _COLUMNS.split(line.strip())
        if cells[0] == "NPU ID":
            header = cells
        elif header and len(cells) == len(header):
            chips += _parse_chip(dict(zip(header, cells, strict=True)))
    return chips


def parse_super_pod(text: str) -> SuperPod | None:
    """Return the super pod of `-t spod-info`, None if the device has none."""
    fields = dict(parse_fields(text))
    if "SDID" not in fields or "Super Pod ID" not in fields:
        return None
    return SuperPod(fields["SDID"], fields["Super Pod ID"])


def parse_states(text: str) -> list[NpuState]:
    """Return the devices of `npu-smi info`: two rows each, first the health, then the memory."""
    rows = list(_device_rows(text))
    pairs = [(first, second) for first, second in pairwise(rows) if _FIRST.match(first[0])]
    num_chips = max((_numbers(second[0])[0] + 1 for _, second in pairs if _numbers(second[0])), default=1)
    return [_state(first, second, num_chips) for first, second in pairs]


def parse_processes(text: str) -> list[NpuProcess]:
    """Return the processes of `npu-smi info`, with the device ids of its upper half."""
    known = {(state.npu_id, state.chip_id): state.device_id for state in parse_states(text)}
    lower = text.partition("Process id")[2]
    found = [_process(cells, known) for cells in map(_cells, lower.splitlines()) if len(cells) >= 4]
    return [process for process in found if process is not None]


def _parse_chip(row: Mapping[str, str]) -> list[Chip]:
    name = row.get("Chip Name", "")
    physical = row.get("Chip Phy-ID", row.get("Chip Logic ID", "-"))
    ids = _numbers(f"{row.get('NPU ID', '-')} {row.get('Chip ID', '-')} {physical}")
    return [] if name == "Mcu" or len(ids) != 3 else [Chip(ids[0], ids[1], str(ids[2]), name)]


def _device_rows(text: str) -> Iterator[list[str]]:
    """Yield the rows between the headers and the process table, three cells each: ids, health or bus id, usage.

    A2 and A3 have id and name in one cell; the 950 has a cell for each.
    """
    upper = text.partition("Process id")[0].partition("Bus-Id")[2]
    for cells in map(_cells, upper.splitlines()):
        if len(cells) >= 3:
            yield cells if len(cells) == 3 else [f"{cells[0]} {cells[1]}".strip(), *cells[2:]]


def _state(first: Sequence[str], second: Sequence[str], num_chips: int) -> NpuState:
    npu, _, name = first[0].partition(" ")
    npu_id, places = int(npu), _numbers(second[0])
    chip_id = places[0] if places else 0
    device_id = places[1] if len(places) > 1 else npu_id * num_chips + chip_id
    return NpuState(str(device_id), npu_id, chip_id, name.strip(), first[1])


def _process(cells: Sequence[str], known: Mapping[tuple[int, int], str]) -> NpuProcess | None:
    places, pid = _numbers(cells[0]), _numbers(cells[1])
    if not places or len(pid) != 1:
        return None
    device_id = known.get((places[0], places[1] if len(places) > 1 else 0), str(places[0]))
    memory = _numbers(cells[3])
    inside = _numbers(cells[4]) if len(cells) > 4 else []
    return NpuProcess(device_id, pid[0], cells[2], memory[0] if memory else None, inside[0] if inside else None)


def _cells(line: str) -> list[str]:
    row = line.strip()
    return [cell.strip() for cell in row.strip("|").split("|")] if row.startswith("|") else []


def _numbers(cell: str) -> list[int]:
    """Return the numbers of a cell, none if it contains anything else."""
    words = cell.split()
    return [int(word) for word in words] if all(_NUMBER.fullmatch(word) for word in words) else []
