"""Become a worker of another engine: the container's vLLM, with the flags that tables and variables imply."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from flags.options import EngineOptions
from pdserve.instance_environment import HCCL_TABLE, prepare_environment
from pdserve.ports import require_free
from pdserve.redaction import redacted, secret_values
from pdserve.variables import PREFIX
from pdserve.workers.program import find_program
from pdserve.workers.serve_line import WorkerLine, WorkerPlace, worker_line
from pdserve.workers.typed_flags import parse
from ranktable_tools.addresses import own_hosts
from ranktable_tools.core_share import core_share
from ranktable_tools.devices.kinds import kind_of_vllm
from ranktable_tools.launch_plan import LaunchPlan
from ranktable_tools.reading import reading_of
from ranktable_tools.rules.rule import RuleOptions
from ranktable_tools.rules.workers import WORKER_RULES
from wire.errors import ConfigError

_CLONE: Final = str(Path(__file__).resolve().parents[2])


def run(argv: Sequence[str], plan: LaunchPlan, environ: Mapping[str, str]) -> int:
    """Print the line and become the worker. Raises ConfigError, and RanktableError if the driver's tool fails."""
    assert plan.own.worker is not None, "plan_of_worker checked it"
    program = find_program(plan.own.worker, environ)
    place, device_line = _place(plan, program, environ)
    line = worker_line(plan, parse(argv), environ, place)
    if device_line:
        print(device_line)
    print(f"starting: {redacted(str(line), secret_values(environ, ()))}", flush=True)
    for rule in WORKER_RULES:
        for problem in rule.check(reading_of(plan.global_table), RuleOptions(plan.share_devices)):
            print(f"warning: {plan.global_path}: {problem} [{rule.code}]", file=sys.stderr, flush=True)
    require_free(line.host, line.port)
    for port in line.kv_ports:
        require_free(line.kv_host, port, line.kv_port_name)
    try:
        os.execvpe(line.argv[0], list(line.argv), worker_environment(environ, line))  # noqa: S606 - the user's program
    except OSError as error:
        raise ConfigError(f"{line.argv[0]} cannot be run: {error.strerror}") from error


def worker_environment(environ: Mapping[str, str], line: WorkerLine) -> dict[str, str]:
    """Return the worker's environment: ours without pdserve's own variables, packages, keys and torch settings."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX) and name != HCCL_TABLE}
    paths = [path for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", _CLONE)]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    if not paths:
        del kept["PYTHONPATH"]
    if kept.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":  # set by guarded.py; vllm-ascend needs torch_npu
        del kept["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    return kept | dict(line.variables)


def _place(
    plan: LaunchPlan, program: tuple[str, ...], environ: Mapping[str, str]
) -> tuple[WorkerPlace, str | None]:  # fmt: skip
    """Return what this machine has for the worker, and the line that lists its cards."""
    kind = kind_of_vllm(is_ascend=plan.own.worker == "vllm-ascend")
    changed = dict(environ)
    prepared = prepare_environment(EngineOptions(device=kind), plan, changed)
    variables = {name: value for name, value in changed.items() if environ.get(name) != value}
    cores: tuple[int, ...] = ()
    if kind == "cpu":
        cores = core_share(plan.global_table, plan.own, own_hosts(), sorted(os.sched_getaffinity(0))).cores
    return WorkerPlace(program, variables, cores, os.urandom(4).hex()), prepared.device_line
