"""`python -m pdserve.describe TABLE`: what the instances of a global table report, and where they differ.

`ranktable doctor` runs this; it needs no scheduler. It queries each instance as the scheduler does, with the secret.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from pdserve.flags.parser import CommandParser
from pdserve.guarded import guarded
from ranktable_tools.addresses import HostComparer
from ranktable_tools.digest import table_digest
from ranktable_tools.node_ports import instance_addresses
from ranktable_tools.peers import peer_addresses
from ranktable_tools.table_file import read_global
from rpc.grpc_connection import GrpcConnection
from scheduler.membership.compatibility import ExpectedInstance, SameHost, check_identity, check_pair, check_version
from security.tls import TlsFiles, tls_files
from security.trust import Trust, find_trust
from wire.description import InstanceDescription
from wire.errors import ConfigError, Incompatible, PdserveError
from wire.types import Role

_TIMEOUT_S = 3.0
Answer = InstanceDescription | PdserveError


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON object: the instances in table order, and messages for the differences."""
    parser = CommandParser(prog="pdserve.describe", description="Query the instances of a global table.")
    parser.add_argument("table", help="the global ranktable; NODE_PORTS overrides its server_port")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, help="seconds per instance (default: 3)")
    for flag in ("--tls-cert", "--tls-key", "--tls-ca"):
        parser.add_argument(flag, help="the same value as that of the instances, if gRPC uses TLS")
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    if not 0 < arguments.timeout <= 600:
        raise ConfigError(f"--timeout is {arguments.timeout:g}, but must be more than 0 and at most 600 seconds")
    tls = tls_files(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    print(json.dumps(asyncio.run(describe(arguments.table, os.environ, arguments.timeout, tls)), indent=2))
    return 0


async def describe(
    path: str, environ: Mapping[str, str], timeout_s: float, tls: TlsFiles | None = None
) -> dict[str, Any]:
    """Query pdserve's own instances of the global table at `path`. Raises RanktableError, ConfigError."""
    table = read_global(path)
    addresses, _ = instance_addresses(table, environ.get("NODE_PORTS"))
    expected = [
        ExpectedInstance(one.index, one.name, Role(one.role), f"{_bracket_ipv6(one.host)}:{one.port}",
                         one.server.server_ip, one.server.device_ids)
        for one in addresses
        if one.server.worker is None
    ]  # fmt: skip
    trust = find_trust(environ, path, peer_addresses(table), tls)
    answers = await asyncio.gather(*(_describe(one.address, trust, timeout_s) for one in expected))
    answered = list(zip(expected, answers, strict=True))
    return {
        "instances": [_instance_fields(one, answer) for one, answer in answered],
        "differences": _find_differences(answered, table_digest(table), HostComparer().same),
    }


async def _describe(address: str, trust: Trust, timeout_s: float) -> Answer:
    connection = GrpcConnection(address, trust)
    try:
        return await connection.describe(timeout_s)
    except PdserveError as error:
        return error
    finally:
        await connection.close()


def _instance_fields(one: ExpectedInstance, answer: Answer) -> dict[str, Any]:
    known: dict[str, Any] = {"index": one.index, "name": one.name, "role": one.role, "address": one.address}
    if isinstance(answer, PdserveError):
        return {**known, "error": str(answer), "refused": isinstance(answer, Incompatible)}
    return {
        **known,
        "error": "",
        "refused": False,
        "model": answer.model.name,
        "weights_digest": answer.model.weights_digest,
        "dtype": answer.dtype,
        "device": answer.device,
        "ranks": len(answer.device_ids),
        "block_size": answer.block_size,
        "num_blocks": answer.num_blocks,
        "max_model_len": answer.max_model_len,
        "kv_tensors": len(answer.kv_tensors),
    }


def _find_differences(
    answered: Sequence[tuple[ExpectedInstance, Answer]], digest: str, same_host: SameHost
) -> list[str]:
    described = [(one, answer) for one, answer in answered if isinstance(answer, InstanceDescription)]
    found = []
    for one, answer in described:
        try:
            check_version(one, answer)
            check_identity(one, answer, table_digest=digest, same_host=same_host)
        except Incompatible as error:
            found.append(str(error))
    for (_, first), (_, second) in combinations(described, 2):
        try:
            check_pair(first, second)
        except Incompatible as error:
            found.append(str(error))
    return found


def _bracket_ipv6(host: str) -> str:
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    sys.exit(guarded("pdserve.describe", main))
