"""Lay out a cluster on this machine: its tables, its internal ports, and the command of each process."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from devices.table import AUTO
from pdserve.ports import free_ports
from pdserve.preset_cards import deal_to_instances
from pdserve.process_plan import ProcessPlan, environment, launch_command
from pdserve.running_workers import NO_WORKERS, RunningWorkers, write_tables
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.devices.kinds import kind_named
from ranktable_tools.generate import Generated
from ranktable_tools.launch_plan import GLOBAL_VARIABLE, LOCAL_VARIABLE
from ranktable_tools.secret import ensure_secret
from ranktable_tools.table_file import read_global, write_global
from ranktable_tools.tables import WorkerKind
from ranktable_tools.worker_kind import VARIABLE
from ranktable_tools.worker_ports import PORT_NAMES
from ranktable_tools.worker_urls import url_of
from scheduler.workers.connectors import BOOTSTRAP_PORT

HOST = "127.0.0.1"
__all__ = ["HOST", "ClusterShape", "ProcessPlan", "environment", "lay_out"]


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The number of instances and ranks, and the flags of all their processes.

    With `worker` the instances are another engine's, with `worker_flags`; `running` workers are used in addition.
    `scheduler_ports` are those of several schedulers, which share `port`.
    """

    num_prefill: int
    num_decode: int
    host: str
    port: int
    flags: tuple[str, ...]
    device: str = AUTO
    num_ranks: int = 1
    worker: WorkerKind | None = None
    worker_flags: tuple[str, ...] = ()
    running: RunningWorkers = NO_WORKERS
    scheduler_ports: tuple[int, ...] = ()


def lay_out(shape: ClusterShape, tables: Path) -> tuple[ProcessPlan, ...]:
    """Write the ranktables and the cluster secret into `tables`; return the processes, instances first.

    Raises ConfigError if an environment variable exposes too few cards.
    """
    num_instances = shape.num_prefill + shape.num_decode
    if num_instances == 0:
        files = write_tables(shape.running, shape.port, tables)
        return scheduler_plans(shape.host, shape.scheduler_ports or (shape.port,), shape.flags, files)
    dealt = deal_to_instances(shape.device, num_instances, shape.num_ranks, os.environ)
    ports = free_ports(num_instances, HOST)
    generated = _generate(shape, ports, tables)
    global_path = tables / generated.global_name
    if shape.running.urls:
        made = read_global(str(global_path))
        prefill, decode = made.prefill + shape.running.prefill, made.decode + shape.running.decode
        write_global(global_path, replace(made, prefill=prefill, decode=decode))
    ensure_secret(tables)
    names = [f"prefill-{i}" for i in range(shape.num_prefill)] + [f"decode-{i}" for i in range(shape.num_decode)]
    flags = shape.flags if shape.worker is None else shape.worker_flags

    def files_of(local: str) -> dict[str, str]:
        return {GLOBAL_VARIABLE: str(global_path), LOCAL_VARIABLE: str(tables / local)}

    bootstrap = _bootstrap(shape)
    instances = [
        _process(
            name, HOST, port, flags, {**files_of(local.file_name), **cards, **_of_worker(shape.worker), **bootstrap}
        )
        for name, local, port, cards in zip(names, generated.instances, ports, dealt, strict=True)
    ]
    assert generated.host is not None, "gen was called with api_server=True"
    own = {**files_of(generated.host.file_name), **bootstrap}
    return (*instances, *scheduler_plans(shape.host, shape.scheduler_ports or (shape.port,), shape.flags, own))


def scheduler_plans(
    host: str, ports: Sequence[int], flags: tuple[str, ...], variables: Mapping[str, str]
) -> tuple[ProcessPlan, ...]:
    """Return one scheduler or several; with --roles auto, only the first one changes roles to follow the load."""
    if len(ports) == 1:
        return (_process("scheduler", host, ports[0], flags, variables),)
    return tuple(
        _process(f"scheduler-{i}", host, port, flags if i == 0 else (*flags, "--roles", "fixed"), variables)
        for i, port in enumerate(ports)
    )


def _of_worker(worker: WorkerKind | None) -> dict[str, str]:
    """Return the variables of a worker: its engine, and a KV port that no other cluster on this machine uses."""
    if worker is None:
        return {}
    side_channel = {PORT_NAMES[worker]: str(free_ports(1, HOST)[0])} if worker == "vllm" else {}
    return {VARIABLE: worker, **side_channel}


def _bootstrap(shape: ClusterShape) -> dict[str, str]:
    """Return the port of Mooncake's bootstrap server, for workers and scheduler: one that no other cluster here uses.

    Prefill workers that already run use the port in the scheduler's variable, which then keeps its value.
    """
    if shape.worker != "vllm" or shape.running.prefill or os.environ.get(BOOTSTRAP_PORT):
        return {}
    return {BOOTSTRAP_PORT: str(free_ports(1, HOST)[0])}


def _generate(shape: ClusterShape, ports: Sequence[int], tables: Path) -> Generated:
    ranks = shape.num_ranks
    ids = [",".join(str(i * ranks + rank) for rank in range(ranks)) for i in range(len(ports))]
    arguments = GenArguments(
        prefill_server_list=ids[: shape.num_prefill],
        decode_server_list=ids[shape.num_prefill :],
        api_server=True,
        save_dir=str(tables),
        ip=HOST,
        ports=",".join(map(str, ports)),
        device_type=kind_named(shape.device),
        worker=shape.worker,
    )
    return gen(arguments, lambda line: None, os.environ)


def _process(name: str, host: str, port: int, flags: tuple[str, ...], variables: Mapping[str, str]) -> ProcessPlan:
    return ProcessPlan(
        name=name,
        role=name.partition("-")[0],
        address=url_of(host, port) if VARIABLE in variables else f"{host}:{port}",
        command=launch_command(host, port, flags),
        env=variables,
    )
