"""Set what the libraries below an instance read from the environment: its cards, and the interface of its address."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.addresses import network_variables
from pdserve.device_map import map_devices
from ranktable_tools.devices.kinds import DeviceKind
from ranktable_tools.devices.tools import Run, run_tool
from ranktable_tools.launch_plan import LaunchPlan
from wire.options import EngineOptions

_KINDS: Final[Mapping[str, DeviceKind]] = {"npu": "npu", "cuda": "cuda"}
HCCL_TABLE: Final = "RANK_TABLE_FILE"  # torch_npu would build its groups from it


@dataclass(frozen=True, slots=True)
class InstanceEnvironment:
    """What was done: the line that says which rank has which card, None on CPUs, and the variables of the network."""

    device_line: str | None
    network: Mapping[str, str]


def prepare_environment(
    options: EngineOptions, plan: LaunchPlan, environ: MutableMapping[str, str], *,
    run: Run = run_tool, dev: Path = Path("/dev"),
) -> InstanceEnvironment:  # fmt: skip
    """Change `environ` before anything that reads it is imported. Raises ConfigError and RanktableError."""
    environ.pop(HCCL_TABLE, None)
    kind = _KINDS.get(options.device, "cpu")
    devices = map_devices(kind, plan.own.device_ids, environ, run=run, dev=dev)
    if devices is not None and devices.value is not None:
        environ[devices.variable] = devices.value
    network = network_variables(options.kv_ip or plan.own.server_ip, kind, environ)
    environ.update(network)
    return InstanceEnvironment(None if devices is None else devices.line, network)
