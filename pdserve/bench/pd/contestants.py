"""The contestants: pdserve's P/D pair and colocated instances, and vLLM's, as processes on the same cores."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from devices.table import AUTO
from pdserve import combined
from pdserve.device_map import map_devices
from pdserve.layout import ClusterShape, lay_out
from pdserve.ports import free_ports
from pdserve.preset_cards import deal_to_instances
from pdserve.process_plan import ProcessPlan
from ranktable_tools.devices.kinds import find_kind, kind_named
from ranktable_tools.errors import RanktableError
from wire.errors import ConfigError

HOST = "127.0.0.1"
PAIR, AUTO_PAIR, COLOCATED = "P/D", "P/D --path auto", "colocated"
VLLM_PAIR, VLLM_COLOCATED = "vLLM P/D", "vLLM colocated"
_KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


@dataclass(frozen=True, slots=True)
class ServerContestant:
    """Processes to start, and their URLs: used in turn, or (`hands_off`) as prefill and decode."""

    name: str
    plans: tuple[ProcessPlan, ...]
    urls: tuple[str, ...]
    ready_path: str = "/ready"
    hands_off: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether it is pdserve, with pdserve's metrics at its one URL."""
        return self.ready_path == "/ready"


def halves(cores: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the cores of each of two instances, as a ranktable divides them; a single core is shared."""
    middle = len(cores) // 2
    return (cores[:middle], cores[middle:]) if middle else (cores, cores)


def our_pair(folder: Path, flags: Sequence[str], device: str = AUTO, *, path: str = "handoff") -> ServerContestant:
    """Return one prefill and one decode instance, as `pdserve up` starts them on `device`; tables in `folder`."""
    (port,) = free_ports(1, HOST)
    plans = lay_out(ClusterShape(1, 1, HOST, port, (*flags, "--path", path), device), folder / f"tables-{path}")
    return ServerContestant(PAIR if path == "handoff" else AUTO_PAIR, plans, (_url(port),))


def our_colocated(flags: Sequence[str], cores: Sequence[int], device: str = AUTO) -> ServerContestant:
    """Return two combined instances behind one scheduler, each with half of the cores and a card as in our pair."""
    *ports, front_port = free_ports(3, HOST)
    plans = []
    cards = _cards(device)
    for i, (port, share) in enumerate(zip(ports, halves(cores), strict=True)):
        command = (sys.executable, "-P", "-m", "pdserve.combined", "--host", combined.HOST, "--port", str(port), *flags)
        plans.append(ProcessPlan(f"combined-{i}", "combined", f"{HOST}:{port}", kept(share, command), cards[i]))
    addresses = ",".join(f"{HOST}:{port}" for port in ports)
    python = (sys.executable, "-P", "-m", "pdserve.bench.pd.colocated", addresses)
    serve = (*python, "--host", HOST, "--port", str(front_port), *flags)
    plans.append(ProcessPlan("scheduler", "scheduler", f"{HOST}:{front_port}", serve, {}))
    return ServerContestant(COLOCATED, tuple(plans), (_url(front_port),))


def _cards(device: str) -> tuple[Mapping[str, str], ...]:
    """Return the variables that give each of two instances its card as a ranktable would: device 0, and device 1."""
    kind = find_kind() if device == AUTO else kind_named(device)
    dealt = deal_to_instances(device, 2, 1, os.environ)
    if any(dealt) or kind == "cpu":
        return dealt
    try:
        maps = [map_devices(kind, [str(i)], os.environ) for i in range(2)]
    except (ConfigError, RanktableError):
        if device == AUTO:
            return dealt  # each instance chooses by itself
        raise
    return tuple({} if one is None or one.value is None else {one.variable: one.value} for one in maps)


def vllm(binary: str, model: Path, dtype: str, max_len: int, cores: Sequence[int], *, pair: bool) -> ServerContestant:
    """Return two of vLLM's CPU servers, each with half of the cores; `pair`: connected by its NIXL connector."""
    ports, sides = free_ports(2, HOST), free_ports(2, HOST)
    shares = halves(cores)
    plans = tuple(
        _vllm(f"vllm-{'pd'[i] if pair else i}", binary, model, dtype, max_len, ports[i], sides[i], shares[i], pair=pair)
        for i in range(2)
    )
    name = VLLM_PAIR if pair else VLLM_COLOCATED
    return ServerContestant(name, plans, tuple(map(_url, ports)), "/health", hands_off=pair)


def kept(cores: Sequence[int], command: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs `command` on `cores` through keeper.py."""
    return (sys.executable, "-P", "-m", "pdserve.bench.pd.keeper", ",".join(map(str, cores)), *command)


def _vllm(
    name: str, binary: str, model: Path, dtype: str, max_len: int, port: int, side: int, cores: Sequence[int], *,
    pair: bool,
) -> ProcessPlan:  # fmt: skip
    is_python = Path(binary).name.startswith("python")
    start = (binary, "-m", "vllm.entrypoints.cli.main", "serve") if is_python else (binary, "serve")
    command = [
        *start, str(model), "--served-model-name", "model", "--host", HOST, "--port", str(port), "--dtype", dtype,
        "--max-model-len", str(max_len), "--max-num-seqs", "64",
    ]  # fmt: skip
    if pair:
        command += ["--kv-transfer-config", json.dumps(_KV_TRANSFER)]
    env = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
    }  # fmt: skip
    everywhere = sorted(os.sched_getaffinity(0))  # vLLM binds its own threads, but not its front end
    return ProcessPlan(name, "vllm", f"{HOST}:{port}", kept(everywhere, command), env)


def _url(port: int) -> str:
    return f"http://{HOST}:{port}"
