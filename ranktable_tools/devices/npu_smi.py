"""Read what npu-smi answers on A2, A3 and Ascend 950. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_COLUMNS = re.compile(r"\s{2,}|\t+")
_MEMORY = re.compile(r"([0-9]+)\s*/\s*([0-9]+)$")
_BARS = re.compile(r"^[+\-=\s]*$")


@dataclass(frozen=True, slots=True)
class Chip:
    """One line of `npu-smi info -m`: where a device sits, and its physical id, which is the ranktable's device_id."""

    npu_id: int
    chip_id: int
    device_id: str
    name: str


@dataclass(frozen=True, slots=True)
class NpuState:
    """One device of `npu-smi info`; HBM in MB."""

    device_id: str
    npu_id: int
    chip_id: int
    name: str
    health: str
    hbm_used_mb: int | None
    hbm_total_mb: int | None


@dataclass(frozen=True, slots=True)
class NpuProcess:
    """A process on a device; `pid` is the host's, `container_pid` the container's where the tool tells it."""

    device_id: str
    pid: int
    name: str
    memory_mb: int | None
    container_pid: int | None = None


@dataclass(frozen=True, slots=True)
class SuperPod:
    """The answer to `-t spod-info`: an A3's place in its super pod."""

    super_device_id: str
    super_pod_id: str


def parse_fields(text: str) -> list[tuple[str, str]]:
    """Return the `Key : value` lines of `-l`, `-t board` or `-t spod-info`, in order."""
    parted = [line.partition(":") for line in text.splitlines()]
    return [(key.strip(), value.strip()) for key, colon, value in parted if colon and key.strip()]


def parse_npu_ids(text: str) -> list[int]:
    """Return the NPU ids of `npu-smi info -l`."""
    return [int(value) for key, value in parse_fields(text) if key == "NPU ID" and value.isdigit()]


def parse_map(text: str) -> list[Chip]:
    """Return the devices of `npu-smi info -m`; the management chips (Mcu) and NPUs without a card (-1) are none."""
    header: list[str] = []
    chips = []
    for line in text.splitlines():
        cells = _COLUMNS.split(line.strip())
        if cells[0] == "NPU ID":
            header = cells
        elif header and len(cells) == len(header):
            chips += _chip(dict(zip(header, cells, strict=True)))
    return chips


def parse_super_pod(text: str) -> SuperPod | None:
    """Return the super pod of `-t spod-info`, None where the device has none."""
    fields = dict(parse_fields(text))
    if "SDID" not in fields or "Super Pod ID" not in fields:
        return None
    return SuperPod(fields["SDID"], fields["Super Pod ID"])


def parse_states(text: str) -> list[NpuState]:
    """Return the devices of `npu-smi info`: two rows each, the first with the health, the second with the memory."""
    rows = list(_device_rows(text))
    pairs = [(first, second) for first, second in zip(rows[::2], rows[1::2], strict=False)]
    num_chips = max((_numbers(second[0])[0] + 1 for _, second in pairs if _numbers(second[0])), default=1)
    return [_state(first, second, num_chips) for first, second in pairs]


def parse_processes(text: str) -> list[NpuProcess]:
    """Return the processes of `npu-smi info`, by the device ids of its upper half."""
    known = {(state.npu_id, state.chip_id): state.device_id for state in parse_states(text)}
    lower = text.partition("Process id")[2]
    found = [_process(cells, known) for cells in map(_cells, lower.splitlines()) if len(cells) >= 4]
    return [process for process in found if process is not None]


def _chip(row: Mapping[str, str]) -> list[Chip]:
    name = row.get("Chip Name", "")
    ids = [row.get(key, "-") for key in ("NPU ID", "Chip ID")]
    physical = row.get("Chip Phy-ID", row.get("Chip Logic ID", "-"))
    if name == "Mcu" or not all(text.isdigit() for text in (*ids, physical)):
        return []
    return [Chip(int(ids[0]), int(ids[1]), str(int(physical)), name)]


def _device_rows(text: str) -> Iterator[list[str]]:
    """Yield the rows between the headers and the process table."""
    upper = text.partition("Process id")[0]
    past_header = False
    for line in upper.splitlines():
        if line.startswith("+="):
            past_header = True
        cells = _cells(line)
        if past_header and len(cells) >= 3 and not _BARS.match(line) and not cells[0].startswith("NPU"):
            yield cells


def _state(first: Sequence[str], second: Sequence[str], num_chips: int) -> NpuState:
    # A2 and A3 put id and name into one cell; the 950 has a cell for each, and leaves the second row's first one empty.
    words = first[0].split()
    name, health = (" ".join(words[1:]), first[1]) if len(words) > 1 else (first[1], first[2])
    npu_id, places = int(words[0]), _numbers(second[0])
    chip_id = places[0] if places else 0
    device_id = places[1] if len(places) > 1 else npu_id * num_chips + chip_id
    memory = _MEMORY.search(second[-1])
    used, total = (int(memory[1]), int(memory[2])) if memory else (None, None)
    return NpuState(str(device_id), npu_id, chip_id, name, health, used, total)


def _process(cells: Sequence[str], known: Mapping[tuple[int, int], str]) -> NpuProcess | None:
    places = _numbers(cells[0])
    if not places or not cells[1].isdigit():
        return None
    device_id = known.get((places[0], places[1] if len(places) > 1 else 0), str(places[0]))
    inside = int(cells[4]) if len(cells) > 4 and cells[4].isdigit() else None
    return NpuProcess(device_id, int(cells[1]), cells[2], int(cells[3]) if cells[3].isdigit() else None, inside)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def _numbers(cell: str) -> list[int]:
    words = cell.split()
    return [int(word) for word in words] if all(word.isdigit() for word in words) else []
