"""Fake prefill and decode instances behind gRPC, in one process, for the measured scheduler; they only count tokens.

    python benchmarks/front_door/instances.py        prints {"ready": true, "prefill": PORT, "decode": PORT}

Each JSON line on standard input changes both: {"step_s": 0.05} sets the time of one step.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.front_door.addresses import DEVICE_IDS, HOST, ROLES
from rpc.grpc_server import GrpcServer
from simulation.instance import SimulatedInstance
from wire.description import InstanceDescription, ModelIdentity
from wire.kv_layout import KvTensor
from wire.types import PROTOCOL_VERSION, Role

VOCAB = 49_000  # below the default model's 49,152
MAX_LEN = 8_192


def describe(index: int, role: Role, port: int) -> InstanceDescription:
    """Return the description of instance `index`: a huge pool, and any prompt fits into one step."""
    return InstanceDescription(
        instance_id=f"{role}-{index}", epoch=index + 1, server_ip=HOST, device_ids=DEVICE_IDS[role], host=HOST,
        port=port, pid=os.getpid(), role=role, table_digest="", protocol_version=PROTOCOL_VERSION,
        model=ModelIdentity("fake", "0", "0"), max_model_len=MAX_LEN, vocab_size=VOCAB, dtype="float32", block_size=16,
        num_blocks=2**20, kv_tensors=(KvTensor(0, "k", 2, 8, "float32"), KvTensor(0, "v", 2, 8, "float32")),
        prefill_chunk_size=2**20, max_num_seqs=4096, endpoints=(),
    )  # fmt: skip


async def serve() -> None:
    """Serve both until standard input ends."""
    peers: dict[str, SimulatedInstance] = {}
    servers, ports = [], {}
    for index, role in enumerate(ROLES):
        server = GrpcServer(HOST, 0)
        ports[role.value] = await server.start()
        instance = SimulatedInstance(describe(index, role, ports[role.value]), peers)
        instance.behaviour.send_s = 0.0
        await server.serve(instance)
        servers.append(server)
    print(json.dumps({"ready": True, **ports}), flush=True)
    await _run_commands(list(peers.values()))
    for server in servers:
        await server.stop(0.0)


async def _run_commands(instances: list[SimulatedInstance]) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        for instance in instances:
            instance.commands.clear()
            instance.behaviour.step_s = command.get("step_s", instance.behaviour.step_s)
        print(json.dumps({"ok": True}), flush=True)


if __name__ == "__main__":
    asyncio.run(serve())
