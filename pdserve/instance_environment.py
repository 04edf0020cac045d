"""Set the variables that an instance's libraries read: its cards, and the network interface of its address."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from devices.table import AUTO
from flags.options import EngineOptions
from pdserve.addresses import network_variables
from pdserve.device_map import DeviceMap, map_devices
from ranktable_tools.devices.kinds import DeviceKind, find_kind, kind_named
from ranktable_tools.devices.tools import Run, run_tool
from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import LaunchPlan
from wire.errors import ConfigError

HCCL_TABLE: Final = "RANK_TABLE_FILE"  # torch_npu would build its process groups from it


@dataclass(frozen=True, slots=True)
class InstanceEnvironment:
    """The device to use, and the variables that were set.

    `device_line` lists the card of each rank, None on CPUs; `network` has the network variables set here.
    """

    device: str
    device_line: str | None
    network: Mapping[str, str]


def prepare_environment(
    options: EngineOptions, plan: LaunchPlan, environ: MutableMapping[str, str], *,
    run: Run = run_tool, dev: Path = Path("/dev"),
) -> InstanceEnvironment:  # fmt: skip
    """Set the variables in `environ` before modules that read them are imported. Raises ConfigError, RanktableError.

    Under `auto`, if the visible cards are not the entry's, the instance uses the CPU; `device_line` gives the reason.
    """
    environ.pop(HCCL_TABLE, None)
    device, kind = options.device, find_kind(dev) if options.device == AUTO else kind_named(options.device)
    cards, line = _choose_devices(device, kind, plan.own.device_ids, environ, run, dev)
    if cards is None and device == AUTO and line is not None:
        device = kind = "cpu"
    if cards is not None and cards.value is not None:
        environ[cards.variable] = cards.value
    network = network_variables(options.kv_ip or plan.own.server_ip, kind, environ)
    environ.update(network)
    return InstanceEnvironment(device, line, network)


def _choose_devices(
    device: str, kind: DeviceKind, device_ids: tuple[str, ...], environ: Mapping[str, str], run: Run, dev: Path
) -> tuple[DeviceMap | None, str | None]:
    try:
        cards = map_devices(kind, device_ids, environ, run=run, dev=dev)
    except (ConfigError, RanktableError) as error:
        if device != AUTO:
            raise
        return None, f"devices: the CPU, because {error} (--device {kind} makes this an error)"
    if cards is None:
        return None, None
    return cards, cards.line if device != AUTO else f"{cards.line}, if the cards are usable"
