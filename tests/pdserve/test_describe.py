"""`python -m pdserve.describe`: the descriptions of a table's instances, over real sockets to fakes."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.describe import describe, main
from pdserve.ports import free_ports
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.digest import table_digest
from ranktable_tools.secret import ensure_secret
from ranktable_tools.table_file import read_global
from rpc.grpc_server import GrpcServer
from security.secret import Secret
from security.tls import TlsFiles
from security.trust import Trust
from simulation.instance import SimulatedInstance
from tests.security.certificates import Authority
from wire.description import InstanceDescription, ModelIdentity
from wire.errors import ConfigError
from wire.kv_layout import KvTensor
from wire.types import PROTOCOL_VERSION, KvEndpoint, Role

HOST = "127.0.0.1"
SECRET = Secret(b"the-cluster-secret-of-the-tests-" * 2)


class Table:
    """1P1D on free ports; `say` are the descriptions of the two instances."""

    def __init__(self, folder: Path) -> None:
        self.ports = free_ports(2)
        listed = ",".join(map(str, self.ports))
        made = gen(GenArguments(["0"], ["1"], True, str(folder), HOST, listed, "cpu"), lambda line: None)
        self.path = str(folder / made.global_name)
        digest = table_digest(read_global(self.path))
        self.say = [self._description(index, digest) for index in range(2)]

    def _description(self, index: int, digest: str) -> InstanceDescription:
        return InstanceDescription(
            f"instance-{index}", 9, HOST, (str(index),), HOST, self.ports[index], 1, Role.COMBINED, digest,
            PROTOCOL_VERSION, ModelIdentity("m", "w", "t"), 512, 1000, "float32", 16, 64,
            (KvTensor(0, "k", 1, 4, "float32"),), 512, 8, (KvEndpoint("shm", "@x", "h", 0),),
        )  # fmt: skip

    def ask(
        self, trust: Trust = Trust(), *, num: int = 2, here: TlsFiles | None = None, **environ: str
    ) -> dict[str, Any]:
        """Return the output while `num` instances serve with `trust`."""

        async def run() -> dict[str, Any]:
            async with contextlib.AsyncExitStack() as stack:
                for port, description in list(zip(self.ports, self.say, strict=True))[:num]:
                    server = GrpcServer(HOST, port, trust)
                    await server.start()
                    stack.push_async_callback(server.stop, 0)
                    await server.serve(SimulatedInstance(description, {}))
                return await describe(self.path, environ, 5.0, here)

        return asyncio.run(run())


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def _errors(reported: dict[str, Any]) -> Sequence[str]:
    return [one["error"] for one in reported["instances"]]


def test_instances_of_one_cluster_differ_in_nothing(table: Table) -> None:
    reported = table.ask()

    assert reported["differences"] == []
    assert [(one["index"], one["role"], one["model"], one["dtype"], one["error"]) for one in reported["instances"]] == [
        (0, "prefill", "m", "float32", ""), (1, "decode", "m", "float32", ""),
    ]  # fmt: skip
    json.dumps(reported)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": ModelIdentity("other", "w2", "t")}, "model weights differ: "),
        ({"model": ModelIdentity("m", "w", "t2")}, "tokenizer differ: "),
        ({"dtype": "bfloat16"}, "dtype differ: "),
        ({"kv_tensors": (KvTensor(0, "k", 2, 4, "float32"),)}, " differ: "),
        ({"device_ids": ("7",)}, "is NODE_PORTS not in the table's order?"),
        ({"table_digest": "another"}, "read another global table"),
        ({"protocol_version": 0}, "uses protocol version 0"),
    ],
)
def test_a_mismatch_is_reported_with_both_values(table: Table, change: dict[str, Any], words: str) -> None:
    table.say[1] = replace(table.say[1], **change)

    reported = table.ask()

    assert any(words in difference for difference in reported["differences"])


def test_a_missing_instance_is_an_error_and_not_a_mismatch(table: Table) -> None:
    reported = table.ask(num=1)

    first, second = reported["instances"]
    assert (first["error"], second["refused"]) == ("", False)
    assert second["error"].startswith(f"{HOST}:{table.ports[1]}: ")


def test_the_secret_beside_the_table_is_proven(table: Table) -> None:
    path, _ = ensure_secret(Path(table.path).parent)
    path.write_bytes(SECRET.value)

    assert _errors(table.ask(Trust(SECRET))) == ["", ""]
    other = table.ask(Trust(Secret(b"another-" * 8)))
    assert [one["refused"] for one in other["instances"]] == [True, True]
    assert all("cluster secrets differ" in error for error in _errors(other))


def test_instances_with_mutual_tls_need_the_three_files(table: Table, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    there = Trust(tls=authority.sign("instance"))

    assert _errors(table.ask(there, here=authority.sign("doctor"))) == ["", ""]


def test_node_ports_override_the_tables_ports(table: Table) -> None:
    reported = table.ask(num=0, NODE_PORTS="1,2")

    assert [one["address"] for one in reported["instances"]] == [f"{HOST}:1", f"{HOST}:2"]


def test_an_invalid_timeout_and_incomplete_tls_are_refused(table: Table) -> None:
    with pytest.raises(ConfigError, match=r"--timeout is 0, but must be more than 0"):
        main([table.path, "--timeout", "0"])
    with pytest.raises(ConfigError, match="--tls"):
        main([table.path, "--tls-cert", "a.pem"])
