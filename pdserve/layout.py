"""Lay out a cluster on this machine: its tables, its internal ports, and the command of each process."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from devices.table import AUTO
from pdserve.ports import free_ports
from pdserve.preset_cards import deal_to_instances
from pdserve.process_plan import ProcessPlan, environment, launch_command
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.devices.kinds import kind_named
from ranktable_tools.generate import Generated
from ranktable_tools.secret import ensure_secret
from ranktable_tools.tables import WorkerKind
from ranktable_tools.worker_kind import VARIABLE
from ranktable_tools.worker_ports import PORT_NAMES
from ranktable_tools.worker_urls import url_of

HOST = "127.0.0.1"
__all__ = ["HOST", "ClusterShape", "ProcessPlan", "environment", "lay_out"]


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The number of instances and ranks, and the flags of all their processes.

    With a `worker` the instances are another engine's, and have `worker_flags`.
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


def lay_out(shape: ClusterShape, tables: Path) -> tuple[ProcessPlan, ...]:
    """Write the ranktables and the cluster secret into `tables`; return the processes, instances first.

    Raises ConfigError if an environment variable exposes too few cards.
    """
    num_instances = shape.num_prefill + shape.num_decode
    dealt = deal_to_instances(shape.device, num_instances, shape.num_ranks, os.environ)
    ports = free_ports(num_instances, HOST)
    generated = _generate(shape, ports, tables)
    ensure_secret(tables)
    names = [f"prefill-{i}" for i in range(shape.num_prefill)] + [f"decode-{i}" for i in range(shape.num_decode)]
    flags = shape.flags if shape.worker is None else shape.worker_flags
    instances = [
        _process(tables, generated, local.file_name, name, HOST, port, flags, {**cards, **_of_worker(shape.worker)})
        for name, local, port, cards in zip(names, generated.instances, ports, dealt, strict=True)
    ]
    assert generated.host is not None, "gen was called with api_server=True"
    host_file = generated.host.file_name
    return (*instances, _process(tables, generated, host_file, "scheduler", shape.host, shape.port, shape.flags))


def _of_worker(worker: WorkerKind | None) -> dict[str, str]:
    """Return the variables of a worker: its engine, and a KV port that another cluster of this machine does not use."""
    if worker is None:
        return {}
    side_channel = {PORT_NAMES[worker]: str(free_ports(1, HOST)[0])} if worker == "vllm" else {}
    return {VARIABLE: worker, **side_channel}


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


def _process(
    tables: Path, generated: Generated, local: str, name: str, host: str, port: int, flags: tuple[str, ...],
    variables: Mapping[str, str] = MappingProxyType({}),
) -> ProcessPlan:  # fmt: skip
    return ProcessPlan(
        name=name,
        role=name.partition("-")[0],
        address=url_of(host, port) if VARIABLE in variables else f"{host}:{port}",
        command=launch_command(host, port, flags),
        env={
            "GLOBAL_RANK_TABLE_FILE_PATH": str(tables / generated.global_name),
            "RANK_TABLE_FILE_PATH": str(tables / local),
            **variables,
        },
    )
