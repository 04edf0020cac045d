"""Build the InstanceConfig from an instance's command line and its table entry."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from devices.table import AUTO
from flags.options import EngineOptions, from_namespace
from instance.config import InstanceConfig
from pdserve.flags.parser import prepare
from pdserve.step_tokens import check_step_tokens
from ranktable_tools.addresses import own_hosts
from ranktable_tools.launch_plan import CoreShare, LaunchPlan, core_share
from scheduler import config as scheduler_config
from security.trust import Trust
from wire.errors import ConfigError
from wire.types import Role

_OF_LAUNCH = ("global_rank_table", "node_ports", "use_openai")


@dataclass(frozen=True, slots=True)
class InstanceLaunch:
    """A config, and notices about it for the operator."""

    config: InstanceConfig
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InstanceFlags:
    """The options of an instance's command line, and notices about flags without effect."""

    options: EngineOptions
    notices: tuple[str, ...]


def parse_instance_flags(argv: Sequence[str], environ: Mapping[str, str]) -> InstanceFlags:
    """Parse a command line that may have --config and vLLM's flags. Raises ConfigError."""
    parser = scheduler_config.parser()
    prepared = prepare(argv, parser, environ, serves=True)
    namespace = parser.parse_args(prepared.argv)
    ignored = [
        "--" + field.name.replace("_", "-")
        for field in fields(scheduler_config.SchedulerOptions)
        if field.name in namespace and field.name not in (*_OF_LAUNCH, *prepared.from_file)
    ]
    notices = [prepared.notice] if prepared.notice else []
    if ignored:
        notices.append(f"without effect on an instance: {', '.join(ignored)} (the scheduler serves the API)")
    return InstanceFlags(from_namespace(EngineOptions, namespace), tuple(notices))


def launch(options: EngineOptions, plan: LaunchPlan, trust: Trust | None = None) -> InstanceLaunch:
    """Return the config of the instance that `plan` describes. Raises ConfigError."""
    check_step_tokens(options)
    devices = plan.own.device_ids
    share, notices = CoreShare((), shared=False), []
    if options.device in (AUTO, "cpu"):
        check_tensor_parallel(options.tensor_parallel_size, devices)
        share = core_share(plan.global_table, plan.own, own_hosts(), sorted(os.sched_getaffinity(0)))
    if share.shared:
        own = f"device{'' if len(devices) == 1 else 's'} {','.join(devices)}"
        notices.append(f"the cores of {own} are shared with others: this host has fewer cores than devices")
    config = InstanceConfig(
        options=replace(options, port=_port(options, plan)),
        role=Role(plan.role),
        server_ip=plan.own.server_ip,
        device_ids=devices,
        table_digest=plan.table_digest,
        table_port=plan.own.server_port,
        cores=share.cores,
        quota_share=share.of_host,
        trust=trust or Trust(),
        plan=plan,
    )
    return InstanceLaunch(config, tuple(notices))


def check_tensor_parallel(size: int | None, devices: Sequence[str]) -> None:
    """Raise ConfigError, with both numbers, unless `size` is the number of devices."""
    if size is not None and size != len(devices):
        raise ConfigError(
            f"--tensor-parallel-size {size} differs from the {len(devices)} device{'' if len(devices) == 1 else 's'} "
            f"of the local ranktable ({','.join(devices)}): use {len(devices)} or omit it"
        )


def _port(options: EngineOptions, plan: LaunchPlan) -> int:
    port = options.port or plan.own.server_port
    if not port:
        raise ConfigError("--port is missing: set it to this instance's port in NODE_PORTS")
    if not 0 < port < 65536:
        raise ConfigError(f"--port {port} is not in 1..65535")
    named = plan.own.server_port
    if named not in (None, port) and not plan.has_node_ports:
        raise ConfigError(
            f"--port {port} differs from {named}, the server_port of {plan.name} in {plan.global_path}, to which the "
            f"scheduler connects: use --port {named} or omit it (if NODE_PORTS is set for the scheduler, it "
            "overrides the table: set it here too)"
        )
    return port
