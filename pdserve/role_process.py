"""Run one process of a cluster in the role of its plan; everything needed to serve is imported here."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flags.options import EngineOptions
from pdserve.addresses import check_kv_address, with_own_address
from pdserve.engine_flags import check_engine_flags
from pdserve.flags.parser import prepare
from pdserve.instance_environment import prepare_environment
from pdserve.model_flags import with_plain_model
from pdserve.ports import require_free
from pdserve.start_lines import instance_lines, say, scheduler_lines
from pdserve.step_tokens import check_step_tokens
from pdserve.trust import trust_of
from ranktable_tools.launch_plan import LaunchPlan
from telemetry import logs
from telemetry.start_marks import StartMarks
from wire.errors import ConfigError

if TYPE_CHECKING:
    from scheduler.config import SchedulerConfig  # an instance imports this module too


def run(argv: Sequence[str], plan: LaunchPlan, marks: StartMarks) -> int:
    """Run the process until SIGTERM; `marks` report its start. Raises ConfigError for flags the role refuses."""
    return _run_scheduler(argv, plan) if plan.role == "scheduler" else _run_instance(argv, plan, marks)


def _run_scheduler(argv: Sequence[str], plan: LaunchPlan) -> int:
    from scheduler import config

    prepared = prepare(argv, config.parser(), os.environ, serves=True)
    if prepared.notice:
        print(prepared.notice, flush=True)
    parsed = config.parse(prepared.argv, os.environ)
    parsed = replace(parsed, engine=with_plain_model(parsed.engine, os.environ, weights=False))
    check_step_tokens(parsed.engine)
    return serve_scheduler(parsed, plan)


def serve_scheduler(config: "SchedulerConfig", plan: LaunchPlan) -> int:
    """Run the scheduler of `plan` until SIGTERM. Raises ConfigError."""
    from scheduler import process

    engine = config.engine
    require_free(engine.host, engine.port)
    callbacks = config.options.callback_place()
    if callbacks is not None:
        require_free(*callbacks, "--worker-callback")
    trust = trust_of(plan, os.environ, engine)
    say(scheduler_lines(engine, plan))
    logs.configure(engine.log_level, log_format=engine.log_format)
    return process.run(config, plan, trust)


def _run_instance(argv: Sequence[str], plan: LaunchPlan, marks: StartMarks) -> int:
    from pdserve import instance_flags

    typed = instance_flags.parse_instance_flags(argv, os.environ)
    options = with_own_address(typed.options, plan.own.server_ip)
    trust = trust_of(plan, os.environ, options)
    check_kv_address(options.kv_ip, trust)
    check_engine_flags(options)
    prepared = prepare_environment(options, plan, os.environ)
    options = replace(options, device=prepared.device)
    launch = instance_flags.launch(with_plain_model(options, os.environ), plan, trust)
    say((*typed.notices, *launch.notices))
    options = launch.config.options
    _require_ports(options)
    from instance import process
    from instance.kv_address import kv_host

    say(instance_lines(launch.config, plan, kv_host(launch.config), prepared.device_line, prepared.network))
    logs.configure(options.log_level, log_format=options.log_format)
    return process.run(launch.config, marks)


def _require_ports(options: EngineOptions) -> None:
    if options.http_port == options.port:
        raise ConfigError(f"--http-port {options.http_port} equals --port {options.port}: use two different ports")
    require_free(options.host, options.port)
    if options.http_port is not None:
        require_free(options.host, options.http_port, "--http-port")
