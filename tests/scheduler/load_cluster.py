"""The processes of a load test: the scheduler, and one with two fake instances over gRPC.

python -m tests.scheduler.load_cluster instances
python -m tests.scheduler.load_cluster scheduler PREFILL_PORT DECODE_PORT [flags of the scheduler]
"""

import asyncio
import dataclasses
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rpc.grpc_connection import GrpcConnection
from rpc.grpc_server import GrpcServer
from scheduler import loop
from scheduler.config import parse
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.process import serve_cluster
from scheduler.serving import Cluster
from simulation.instance import SimulatedInstance
from telemetry import logs
from tests.scheduler.fake_cluster import TABLE_DIGEST, describe
from tests.scheduler.load_client import status_of
from wire.types import Role

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
ROLES = (Role.PREFILL, Role.DECODE)
START_S = 300.0
END_S = 300.0
STEP_S = 0.05  # slower than requests come: the queue fills up


@dataclass(frozen=True, slots=True)
class Serving:
    """A scheduler under load: its port, its process and what it logs."""

    port: int
    pid: int
    log: Path

    def memory_mib(self, what: str = "VmRSS") -> float:
        """Return its resident memory, now or (`VmHWM`) its peak."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (kib,) = re.findall(rf"^{what}:\s+(\d+) kB", status, re.MULTILINE)
        return int(kib) / 1024


@asynccontextmanager
async def serving(folder: Path, model: Path, *flags: str) -> AsyncIterator[Serving]:
    """Start both processes, wait until the scheduler is ready, and stop them; `folder` takes its log."""
    log = folder / "scheduler.log"
    async with _child(["instances"], folder / "instances.log") as (instances, out):
        ports = json.loads(await asyncio.wait_for(out.readline(), START_S))
        arguments = ["scheduler", *map(str, ports), "--model", str(model), "--host", HOST, "--port", "0", *flags]
        async with _child(arguments, log) as (scheduler, _):
            async with asyncio.timeout(START_S):
                while (port := await _ready_port(log)) is None:
                    assert scheduler.returncode is None, log.read_text()[-2000:]
                    await asyncio.sleep(0.05)
            yield Serving(port, scheduler.pid, log)
            assert scheduler.returncode is None, log.read_text()[-2000:]
        assert instances.returncode is None


@asynccontextmanager
async def _child(
    arguments: Sequence[str], log: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=output
        )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), END_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _ready_port(log: Path) -> int | None:
    """Return the port that the scheduler serves on, once it is ready."""
    port = _listening_port(log)
    return port if port is not None and await status_of(HOST, port, "/ready") == 200 else None


def _listening_port(log: Path) -> int | None:
    found = re.search(r"listening .*\bport=(\d+)", log.read_text())
    return int(found[1]) if found else None


async def _serve_instances() -> None:
    """Serve a prefill and a decode instance until killed; prints their ports."""
    peers: dict[str, SimulatedInstance] = {}
    ports = []
    servers = []
    for index, role in enumerate(ROLES):
        server = GrpcServer(HOST, 0)
        ports.append(await server.start())
        room = {"num_blocks": 4096, "prefill_chunk_size": 512, "max_num_seqs": 256, "vocab_size": 384}
        described = describe(index, role, host=HOST, max_model_len=512, **room)
        instance = SimulatedInstance(dataclasses.replace(described, port=ports[-1]), peers)
        instance.behaviour.step_s = STEP_S
        await server.serve(instance)
        servers.append(server)
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


def _run_scheduler(ports: Sequence[int], flags: Sequence[str]) -> None:
    config = parse(flags)
    logs.configure(config.engine.log_level)
    expected = tuple(
        ExpectedInstance(index, f"{role}-0", role, f"{HOST}:{port}", "10.0.0.1", (str(index),))
        for index, (role, port) in enumerate(zip(ROLES, ports, strict=True))
    )
    loop.run(serve_cluster(config, Cluster(expected, GrpcConnection, TABLE_DIGEST)))


if __name__ == "__main__":
    if sys.argv[1] == "instances":
        asyncio.run(_serve_instances())
    else:
        _run_scheduler([int(port) for port in sys.argv[2:4]], sys.argv[4:])
