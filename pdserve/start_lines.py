"""The lines that a cluster's process prints at start: its ports, devices and network, and the next step."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flags.options import EngineOptions
from ranktable_tools.addresses import canonical, is_address
from ranktable_tools.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from instance.config import InstanceConfig  # the scheduler imports this module and may lack the engine's packages

_ANY_HOST = ("0.0.0.0", "::", "")  # noqa: S104 - compared, never bound


def instance_lines(
    config: "InstanceConfig", plan: LaunchPlan, kv_host: str, device_line: str | None, variables: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the lines of a prefill or decode instance; `kv_host` is the listen address of its KV port."""
    options = config.options
    set_here = (f"network: {' '.join(f'{name}={value}' for name, value in variables.items())}",) if variables else ()
    return (
        f"ports: control {_host_port(options.host, options.port)}, KV {_kv_port(options, kv_host)}, /health and "
        f"/metrics {_host_port(options.host, options.http_port) if options.http_port else 'off (--http-port)'}",
        device_line or _cores_line(config),
        *set_here,
        *_address_warning(options.host, plan.own.server_ip),
        f"next: start the other instances and the scheduler{_node_ports(options, plan)}; {_status(plan)}",
    )


def scheduler_lines(engine: EngineOptions, plan: LaunchPlan) -> tuple[str, ...]:
    """Return the lines of the scheduler."""
    instances = ", ".join(f"{one.name} {_host_port(one.host, one.port)}" for one in plan.instance_addresses)
    api, question = ("OpenAI API", "/v1/models") if plan.use_openai else ("/generate", "/health")
    return (
        f"ports: {api} {_host_port(engine.host, engine.port)}",
        "devices: none",
        f"next: it waits for {instances}; once it is ready, try: curl http://{_reachable(engine, plan)}{question}",
    )


def say(lines: Iterable[str]) -> None:
    """Print and flush: stdout may be a file that someone follows."""
    for line in lines:
        print(line, flush=True)


def _address_warning(host: str, server_ip: str) -> tuple[str, ...]:
    """Warn if --host does not cover the instance's address in the table; a host name may resolve to any."""
    if host in _ANY_HOST or canonical(host) == canonical(server_ip):
        return ()
    if not is_address(host) and canonical(host) != "localhost":
        return ()
    anywhere = "::" if ":" in server_ip else "0.0.0.0"  # noqa: S104 - printed, never bound
    return (
        f"warning: --host {host} does not listen on {server_ip}, the address in the table, to which the "
        f"scheduler connects: set --host {server_ip} or --host {anywhere}, unless a proxy or a network namespace is "
        "between",
    )


def _kv_port(options: EngineOptions, host: str) -> str:
    from kvtransfer.transport_table import need_port

    if not need_port(options.kv_transport):
        return f"none ({', '.join(options.kv_transport)})"
    return f"{options.kv_port_range or 'any free port'} of {host}"


def _cores_line(config: "InstanceConfig") -> str:
    cores = ",".join(map(str, config.cores)) or "all"
    ranks = ", ".join(f"rank {rank} = device {device_id}" for rank, device_id in enumerate(config.device_ids))
    return f"devices: {ranks} on CPU cores {cores}"


def _node_ports(options: EngineOptions, plan: LaunchPlan) -> str:
    """Return the NODE_PORTS entry that the scheduler needs; empty where the table has the port."""
    assert plan.index is not None, "an instance has its place in the table"
    if plan.own.server_port == options.port:
        return ""
    return f", whose NODE_PORTS has {options.port} as number {plan.index + 1} of {len(plan.global_table.instances)}"


def _status(plan: LaunchPlan) -> str:
    """Return how to inspect the cluster; only the table can give an instance the scheduler's port."""
    scheduler = plan.global_table.scheduler
    port, where = scheduler.server_port, "" if scheduler.server_port else ", at the scheduler's --port,"
    return f"`pdserve status --url http://{_host_port(scheduler.server_ip, port or 'PORT')}`{where} shows them"


def _reachable(engine: EngineOptions, plan: LaunchPlan) -> str:
    return _host_port(plan.own.server_ip if engine.host in _ANY_HOST else engine.host, engine.port)


def _host_port(host: str, port: int | str | None) -> str:
    return f"{f'[{host}]' if ':' in host else host}:{port}"
