"""A worker's command line and variables, from its plan and what was typed. Pure, except for resolving host names.

tables: role, devices, host   -> --kv-transfer-config, --tensor-parallel-size, KV ports, --host, --port
typed                          -> everything else, as it is; what is typed wins
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdserve.workers.kv_config import MOONCAKE_CLASS, Sizes, connector_class, kv_config, typed_config
from pdserve.workers.typed_flags import CONNECTOR, KV_CONFIG, TypedFlags, without_secrets
from ranktable_tools.addresses import HostComparer, canonical, dial_host, is_address
from ranktable_tools.launch_plan import LaunchPlan
from ranktable_tools.ports import parse_port
from ranktable_tools.tables import InstanceEntry
from ranktable_tools.worker_ports import PORT_NAMES, kv_ports
from ranktable_tools.worker_urls import listed_port
from scheduler.workers.connectors import AUTO, BOOTSTRAP_PORT, DEFAULT_BOOTSTRAP_PORT
from wire.errors import ConfigError

_SIDE_HOST, _SIDE_PORT, _HOST_IP = "VLLM_NIXL_SIDE_CHANNEL_HOST", PORT_NAMES["vllm"], "VLLM_HOST_IP"
_CORES, _CPU_POOL = "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"
_DETAILS = "enable-prompt-tokens-details"


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """What the machine has for a worker: the program, the variables of its cards and network, and on CPUs its cores."""

    program: tuple[str, ...]
    variables: Mapping[str, str]
    cores: tuple[int, ...] = ()
    life: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A worker's command line, its variables, and where it listens: on `port` for HTTP, on `kv_ports` for KV.

    `variables` includes those that were already set, so that the printed line also works in another shell.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    host: str
    port: int
    kv_host: str
    kv_ports: range
    kv_port_name: str

    def __str__(self) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*words, shlex.join(without_secrets(self.argv))])


def worker_line(plan: LaunchPlan, typed: TypedFlags, environ: Mapping[str, str], place: WorkerPlace) -> WorkerLine:
    """Return the line of the worker that `plan` describes. Raises ConfigError for what does not fit its entry."""
    model = typed.values.get("model")
    if model is None:
        raise ConfigError("--model is missing: set it to the model's folder or name")
    sizes = _sizes(plan, typed)
    host, port = typed.values.get("host") or dial_host(plan.own.server_ip), _port(plan, typed)
    assert plan.own.worker is not None, "the caller checked it"
    config = typed_config(typed.values.get(KV_CONFIG))
    implied_class = connector_class(plan.own.worker, typed.values.get(CONNECTOR, AUTO))
    kv = _kv_ports(plan, str(config.get("kv_connector", implied_class)), config, environ, sizes)
    kv_host = environ.get(_SIDE_HOST) or dial_host(plan.own.server_ip)
    _refuse_taken(plan, port, kv)
    config = kv_config(plan, implied_class, sizes, kv.ports.start, place.life, config)
    flags = {"host": host, "port": str(port), "tensor-parallel-size": str(sizes.tensor)}
    added = [word for name, value in flags.items() if name not in typed.values for word in (f"--{name}", value)]
    if not {_DETAILS, f"no-{_DETAILS}"} & typed.values.keys():
        added.append(f"--{_DETAILS}")
    argv = (*place.program, "serve", model, *added, f"--{KV_CONFIG}", json.dumps(config), *typed.passed)
    implied = {**_variables(plan, kv_host, kv), **_cpu(place.cores, len(plan.own.devices))}
    effective = {name: environ.get(name) or value for name, value in implied.items()}
    return WorkerLine(argv, {**place.variables, **effective}, host, port, kv_host, kv.ports, kv.name)


def _sizes(plan: LaunchPlan, typed: TypedFlags) -> Sizes:
    """Return the worker's sizes. Raises ConfigError unless their product is the number of devices.

    By default the tensor-parallel size is the number of devices divided by the other sizes.
    """
    data = typed.number("data-parallel-size-local") or typed.number("data-parallel-size") or 1
    pipeline = typed.number("pipeline-parallel-size") or 1
    num = len(plan.own.devices)
    tensor = typed.number("tensor-parallel-size") or max(num // (data * pipeline), 1)
    if tensor * data * pipeline != num:
        others = "".join(
            f" x --{name} {size}" for name, size in (("data-parallel-size", data), ("pipeline-parallel-size", pipeline))
            if size > 1
        )  # fmt: skip
        ids = ",".join(plan.own.device_ids)
        raise ConfigError(
            f"--tensor-parallel-size {tensor}{others} differs from the {num} device{'' if num == 1 else 's'} of the "
            f"local ranktable ({ids}): the two must be equal"
        )
    return Sizes(tensor, data, pipeline)


def _port(plan: LaunchPlan, typed: TypedFlags) -> int:
    listed, text = plan.own.server_port, typed.values.get("port")
    port = listed or listed_port(plan.own) if text is None else parse_port(text)
    if text is not None and port is None:
        raise ConfigError(f"--port {text} is not in 1..65535")
    if port is None:
        raise ConfigError("--port is missing: set it to this instance's port in NODE_PORTS")
    if listed not in (None, port) and plan.own.url is None and not plan.has_node_ports:
        raise ConfigError(
            f"--port {port} differs from {listed}, the server_port of {plan.name} in {plan.global_path}, to which the "
            f"scheduler connects: use --port {listed} or omit it"
        )
    return port


@dataclass(frozen=True, slots=True)
class _KvPorts:
    """The KV ports of a worker, none where they are not known before the start, and the setting of the first one."""

    ports: range
    name: str


def _kv_ports(
    plan: LaunchPlan, connector: str, config: Mapping[str, object], environ: Mapping[str, str], sizes: Sizes
) -> _KvPorts:
    """Return the ports: NIXL has one for each data-parallel rank, and Ascend's Mooncake one for each device."""
    assert plan.own.worker is not None, "the caller checked it"
    is_bootstrap = plan.own.worker == "vllm" and connector == MOONCAKE_CLASS
    name = BOOTSTRAP_PORT if is_bootstrap else PORT_NAMES[plan.own.worker]
    chosen = environ.get(name) if plan.own.worker == "vllm" else config.get("kv_port")
    first = None
    if chosen:
        first = parse_port(str(chosen))
        if first is None:
            raise ConfigError(f"{name} is {chosen!r}, which is not in 1..65535")
    if is_bootstrap:
        start = first or DEFAULT_BOOTSTRAP_PORT
        return _KvPorts(range(start, start + (plan.role == "prefill")), name)
    ports = kv_ports(plan.own, first)
    return _KvPorts(ports[: sizes.data] if plan.own.worker == "vllm" else ports, name)


def _refuse_taken(plan: LaunchPlan, port: int, kv: _KvPorts) -> None:
    """Raise ConfigError if this worker's ports overlap, or are used by another entry on its host."""
    if port in kv.ports:
        raise ConfigError(
            f"--port {port} is one of the KV ports of {plan.name}, {_span(kv.ports)} ({kv.name}): use another port"
        )
    hosts = HostComparer()
    for other in plan.global_table.instances:
        if other.index == plan.index or not hosts.same(other.server.server_ip, plan.own.server_ip):
            continue
        theirs = _ports_of(other, has_kv_ports=kv.name != BOOTSTRAP_PORT)
        taken = next((one for one in theirs if one == port or one in kv.ports), None)
        if taken is not None:
            own = "--port" if taken == port else kv.name
            raise ConfigError(
                f"{own} {taken} of {plan.name} is a port of {other} on {other.server.server_ip} too "
                f"({other.json_path}): use another port, or other devices"
            )


def _ports_of(entry: InstanceEntry, *, has_kv_ports: bool) -> Iterator[int]:
    port = listed_port(entry.server)
    yield from () if port is None else (port,)
    yield from kv_ports(entry.server) if has_kv_ports and entry.server.url is None else ()


def _span(ports: range) -> str:
    return str(ports.start) if len(ports) == 1 else f"{ports.start} to {ports.stop - 1}"


def _variables(plan: LaunchPlan, kv_host: str, kv: _KvPorts) -> dict[str, str]:
    if kv.name == _SIDE_PORT:
        return {_SIDE_HOST: kv_host, _SIDE_PORT: str(kv.ports.start)}
    own = plan.own.server_ip  # Mooncake sends its peers the address that vLLM takes for the host's
    host = {_HOST_IP: own} if is_address(own) and canonical(own) != "localhost" else {}
    return host | ({BOOTSTRAP_PORT: str(kv.ports.start)} if kv.name == BOOTSTRAP_PORT and kv.ports else {})


def _cpu(cores: tuple[int, ...], ranks: int) -> dict[str, str]:
    """Return the variables of vLLM's CPU build: the cores of each rank, and the GiB of KV that is pdserve's default."""
    if not cores:
        return {}
    bounds = [(rank * len(cores) // ranks, (rank + 1) * len(cores) // ranks) for rank in range(ranks)]
    shares = (cores[start : max(end, start + 1)] for start, end in bounds)
    return {_CORES: "|".join(",".join(map(str, share)) for share in shares), _CPU_POOL: "1"}
