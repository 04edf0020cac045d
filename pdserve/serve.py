"""`pdserve serve MODEL`: the scheduler's API and one combined instance in one process."""

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

from flags.options import EngineOptions, add_flags, from_namespace
from native.ticker import start_ticker
from pdserve.engine_flags import check_device, check_engine_flags, refuse_empty
from pdserve.flags.parser import CommandParser
from pdserve.instance_environment import HCCL_TABLE
from pdserve.ports import require_free
from pdserve.up_request import fill_model
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.loop import run
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.observability.traces import check_traces
from scheduler.process import serve_cluster
from scheduler.serving import Cluster
from telemetry import logs
from wire.errors import ConfigError, PdserveError
from wire.types import Role

DEFAULT_PORT = 8000
HOST = "127.0.0.1"
DEVICE_IDS = ("0",)
EPILOG = """\
examples:
  pdserve serve                                    the default model on port 8000
  pdserve serve ~/models/Qwen3-0.6B --dtype bfloat16 --port 8001
"""


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError for wrong input."""
    config = parse(argv)
    require_free(config.engine.host, config.engine.port)
    logs.configure(config.engine.log_level, log_format=config.engine.log_format)
    check_traces(config.options.otlp_traces_endpoint, os.environ)
    os.environ.pop(HCCL_TABLE, None)
    try:
        import instance.local  # noqa: F401 - only to report missing packages before anything starts
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serving needs the engine ({error.name} is missing): pip install 'pdserve[engine]'"
        ) from error
    start_ticker()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it serves: closing the loop would wait for the model
    run(_serve(config))
    return 0


def parse(argv: Sequence[str]) -> SchedulerConfig:
    """Parse the command line. Raises ConfigError."""
    parser = CommandParser(
        serves=True,
        prog="pdserve serve",
        usage="pdserve serve [MODEL] [flags]",
        description="Serve one model from one process: prefill and decode on one combined instance.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder_help = "folder of the model, or its name on the hub (default: SmolLM2-135M-Instruct)"
    parser.add_argument("folder", nargs="?", metavar="MODEL", help=folder_help)
    add_flags(parser, EngineOptions)
    add_flags(parser, SchedulerOptions)
    namespace = parser.parse_args(argv)
    refuse_empty(namespace, {"folder": "MODEL"})
    if namespace.folder and "model" in namespace and "model" not in parser.from_file:
        raise ConfigError(f"the model is given twice: {namespace.folder} and --model {namespace.model}")
    if "ip" in namespace and "ip" not in parser.from_file:
        raise ConfigError(f"--ip {namespace.ip} is for an instance of a ranktable: set the listen address with --host")
    if "share_devices" in namespace and "share_devices" not in parser.from_file:
        raise ConfigError("--share-devices is for the instances of a ranktable: leave it out")
    namespace.model = namespace.folder or getattr(namespace, "model", "")
    namespace.port = getattr(namespace, "port", DEFAULT_PORT)
    check_engine_flags(from_namespace(EngineOptions, namespace))
    check_device(from_namespace(EngineOptions, namespace))
    fill_model(namespace)
    options = from_namespace(SchedulerOptions, namespace, dict(os.environ))
    return SchedulerConfig(from_namespace(EngineOptions, namespace), options)


async def _serve(config: SchedulerConfig) -> None:
    from instance.config import InstanceConfig
    from instance.local import LocalInstance

    instance_config = InstanceConfig(config.engine, Role.COMBINED, server_ip=HOST, device_ids=DEVICE_IDS)
    lost: list[PdserveError] = []
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end(error: PdserveError) -> None:
        lost.append(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended already
            loop.call_soon_threadsafe(stop.set)

    instance = await LocalInstance.start(instance_config, end)
    for note in instance.notes:
        print(note, flush=True)

    def health() -> str | None:
        return None if instance.healthy() else f"the engine has made no progress for {instance.progress_age():.0f} s"

    expected = ExpectedInstance(0, "combined-0", Role.COMBINED, f"{HOST}:{config.engine.port}", HOST, DEVICE_IDS)
    try:
        await serve_cluster(config, Cluster((expected,), lambda address: instance.connection(), health=health), stop)
    finally:
        await instance.stop()
    if lost:
        raise lost[0]
