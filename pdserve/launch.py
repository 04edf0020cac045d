"""`python -P -m pdserve.launch`: one process of a cluster; its local ranktable determines its role.

deploy/PD_separate/start_servers.sh and `pdserve up` run this, with the same flags for every role.
"""

import os
import sys

if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]  # the current folder must not shadow pdserve's packages
if __name__ == "__main__":  # import it again as a module, where Ctrl-C is handled
    from importlib import import_module

    from pdserve.guarded import guarded, leave

    leave(guarded("pdserve.launch", lambda: import_module("pdserve.launch").main()))

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flags.options import EngineOptions
from pdserve.config_pipe import kept_config
from pdserve.engine_flags import refuse_empty, refuse_missing
from pdserve.flags.parser import CONFIG_HELP, prepare
from pdserve.guarded import guarded
from pdserve.parent_death import die_with_parent
from pdserve.start_lines import say
from pdserve.table_wait import when_completed
from processes.failpoints import process_failpoints
from ranktable_tools.devices.kinds import kind_named, may_share
from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import LaunchPlan, resolve
from ranktable_tools.node_ports import refuse_port_of_scheduler, swapped_ports_warning
from ranktable_tools.worker_kind import VARIABLE as WORKER
from ranktable_tools.worker_kind import requested_worker
from telemetry.start_marks import PROCESS, StartMarks
from wire.errors import ConfigError

USAGE = """\
start_servers.sh starts one process of a cluster; its local ranktable determines its role. Environment:
  GLOBAL_RANK_TABLE_FILE_PATH  the global ranktable, the same everywhere
  RANK_TABLE_FILE_PATH         this process's local ranktable
  NODE_PORTS                   scheduler: ports of the instances in table order, such as 8088,8089
  USE_OPENAI                   scheduler: 1 (the OpenAI API, the default) or 0 (/generate)
  PDSERVE_SECRET_FILE          the cluster secret (default: cluster_secret beside the global ranktable, if it exists)
  PDSERVE_WORKER               instance: vllm or vllm-ascend, the engine to start in place of pdserve's own
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process until SIGTERM; return 2 for wrong flags, environment or tables."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded("pdserve.launch", lambda: _launch(arguments))


def describe(plan: LaunchPlan) -> str:
    """Return a line that names the table entry of this process."""
    if plan.index is None:
        return f"this process is the scheduler ({plan.own.server_ip})"
    devices = ",".join(plan.own.device_ids)
    return f"this process is {plan.name} ({plan.own.server_ip}, devices {devices})"


def plan_of(argv: Sequence[str], environ: Mapping[str, str]) -> LaunchPlan:
    """Return the role of this process from environment, flags and tables; wait for tables not yet completed.

    Raises ConfigError, and RanktableError, which suggests --share-devices if two instances have the same device.
    """
    from scheduler.config import SchedulerOptions

    namespace = read_flags(argv, environ)
    share = getattr(namespace, "share_devices", False)
    device = getattr(namespace, "device", EngineOptions().device)
    if share and not may_share(kind_named(device)):
        raise ConfigError(f"--share-devices is for GPUs: with --device {device} each NPU belongs to one instance only")
    try:
        plan = when_completed(
            lambda: resolve(table_variables(namespace, environ), share_devices=share),
            getattr(namespace, "startup_timeout", SchedulerOptions().startup_timeout),
            lambda line: print(line, flush=True),
        )
    except RanktableError as error:
        if error.code != "device-twice":
            raise
        advice = f"{error} Two instances may share a GPU if every process is started with --share-devices"
        raise RanktableError(advice, code=error.code, json_path=error.json_path, value=error.value) from error
    _check_engine(plan)
    _check_port(namespace, plan)
    refuse_missing(getattr(namespace, "model", ""))
    if plan.index is None or "port" not in namespace:
        return plan
    node_ports = table_variables(namespace, environ).get("NODE_PORTS", "")
    warning = swapped_ports_warning(node_ports, plan.global_table, plan.index, namespace.port)
    return replace(plan, warnings=tuple(filter(None, (*plan.warnings, warning))))


def _check_engine(plan: LaunchPlan) -> None:
    """Refuse the entry of another engine's worker."""
    if plan.own.worker is not None:
        raise ConfigError(
            f"{plan.name} of {plan.global_path} is a worker of {plan.own.worker}: set {WORKER}={plan.own.worker} to "
            'start it, or remove "worker" from its entry'
        )


def _check_port(namespace: argparse.Namespace, plan: LaunchPlan) -> None:
    """Refuse a --port that is out of range, or an instance port equal to the scheduler's on its host."""
    from scheduler.config import DEFAULT_PORT

    port = getattr(namespace, "port", DEFAULT_PORT)
    if not 0 < port < 65536:
        raise ConfigError(f"--port {port} is not in 1..65535")
    source = "NODE_PORTS" if plan.has_node_ports else "the global table"
    refuse_port_of_scheduler(plan.instance_addresses, plan.global_table.scheduler, port, source)


def read_flags(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """Parse the flags of a command line and its --config, for any role. Raises ConfigError."""
    from scheduler import config

    parser = config.parser()
    namespace = parser.parse_args(prepare(argv, parser, environ, serves=True).argv)
    refuse_empty(namespace)
    return namespace


def table_variables(namespace: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, with the guide's variables overridden by their flags."""
    fields = {"GLOBAL_RANK_TABLE_FILE_PATH": "global_rank_table", "USE_OPENAI": "use_openai"}
    overrides = {variable: getattr(namespace, name) for variable, name in fields.items() if name in namespace}
    if "node_ports" in namespace:
        overrides["NODE_PORTS"] = ",".join(map(str, namespace.node_ports))
    return {**environ, **overrides}


def _launch(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        return _print_help()
    die_with_parent(os.environ)
    marks = StartMarks.take(os.environ)
    marks.set(PROCESS)
    process_failpoints()  # a wrong setting ends the process before it serves
    if requested_worker(os.environ) is not None and (status := _worker_status(argv)) is not None:
        return status
    with kept_config(argv) as kept:
        plan = plan_of(kept, os.environ)
        say((describe(plan), *plan.notes))
        for warning in plan.warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        from pdserve import role_process  # slow imports, only for a valid plan

        return role_process.run(kept, plan, marks)


def _worker_status(argv: Sequence[str]) -> int | None:
    """Become a worker of another engine; None in the scheduler's process, which PDSERVE_WORKER does not change."""
    from pdserve.workers.plan import plan_of_worker

    plan = plan_of_worker(argv, os.environ)
    if plan is None:
        return None
    say((describe(plan), *plan.notes))
    from pdserve.workers import start  # slow imports, only for a valid plan

    return start.run(argv, plan, os.environ)


def _print_help() -> int:
    from scheduler import config

    print(USAGE)
    print(f"  --config FILE  {CONFIG_HELP}\n  vLLM's engine and server flags are accepted too: docs/flags.md\n")
    parser = config.parser()
    parser.prog, parser.usage, parser.description = "start_servers.sh", "start_servers.sh [flags]", None
    parser.print_help()
    return 0
