"""The command line of a worker of another engine: from table, flags and variables to arguments and variables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdserve.workers.program import find_program
from pdserve.workers.serve_line import WorkerLine, WorkerPlace, worker_line
from pdserve.workers.start import worker_environment
from pdserve.workers.typed_flags import parse, without_secrets
from ranktable_tools.launch_plan import LaunchPlan
from ranktable_tools.tables import GlobalTable, Role, TableDevice, TableServer, WorkerKind
from wire.errors import ConfigError

A, B = "10.0.0.18", "10.0.0.19"
_FLAGS = ("--model=/m", "--port=8088")
_VLLM = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "fail"}


def _server(ip: str, *ids: int, worker: WorkerKind | None = "vllm", port: int | None = None) -> TableServer:
    devices = tuple(TableDevice(str(one), ip, str(rank)) for rank, one in enumerate(ids))
    return TableServer(ip, ip, devices, port, worker)


def _plan(role: Role, prefill: Sequence[TableServer], decode: Sequence[TableServer]) -> LaunchPlan:
    table = GlobalTable(TableServer(A, A), tuple(prefill), tuple(decode))
    entry = next(one for one in table.instances if one.role == role)
    return LaunchPlan(role, table, "g.json", "l.json", "", entry.server, entry.index, entry.name)


def _of_sizes(prefill: int, decode: int, worker: WorkerKind) -> tuple[list[TableServer], list[TableServer]]:
    return [_server(A, *range(prefill), worker=worker)], [_server(B, *range(decode), worker=worker)]


def _line(
    plan: LaunchPlan, typed: Sequence[str], environ: Mapping[str, str] | None = None, cores: tuple[int, ...] = ()
) -> WorkerLine:
    return worker_line(plan, parse(typed), environ or {}, WorkerPlace(("vllm",), {}, cores, "c0ffee"))


def _config(line: WorkerLine) -> Any:
    return json.loads(line.argv[line.argv.index("--kv-transfer-config") + 1])


@dataclass(frozen=True)
class Row:
    """One worker: its role, sizes of prefill and decode, what is typed and set, and what of the result is checked."""

    role: Role = "prefill"
    sizes: tuple[int, int] = (2, 2)
    worker: WorkerKind = "vllm"
    typed: tuple[str, ...] = _FLAGS
    environ: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] | None = None
    num_kv_ports: int | None = None


def _ascend(prefill: tuple[int, int], decode: tuple[int, int]) -> dict[str, Any]:
    sizes = {"prefill": prefill, "decode": decode}
    return {role: {"dp_size": data, "tp_size": tensor} for role, (data, tensor) in sizes.items()}


_MOONCAKE = (*_FLAGS, "--connector=mooncake")
_SIDE = {"VLLM_NIXL_SIDE_CHANNEL_HOST": A, "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
ROWS = {
    "prefill": Row(words=("vllm serve /m", "--tensor-parallel-size 2"), config=_VLLM, variables=_SIDE),
    "decode": Row("decode", config=_VLLM | {"kv_role": "kv_consumer"}, variables=_SIDE | {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": B,
    }),
    "what is typed stays, in order": Row(
        typed=("--model", "/m", "--host=0.0.0.0", "--port=8088", "-tp=2", "--served-model-name", "a", "b", "-q=awq"),
        words=(
            "serve /m --enable-prompt-tokens-details --kv-transfer-config",
            "--host=0.0.0.0 --port=8088 -tp=2 --served-model-name a b -q=awq",
        ),
    ),
    "the model may be the first word": Row(typed=("/m", "--port", "8088"), words=("vllm serve /m --host",)),
    "host and port of the table": Row(words=(f"--host {A} ",)),
    "data parallel": Row(
        sizes=(4, 2), typed=(*_FLAGS, "--data-parallel-size=2"), words=("--tensor-parallel-size 2",)
    ),
    "a switch that is turned off": Row(
        typed=(*_FLAGS, "--no-enable-prompt-tokens-details"), words=("--no-enable-prompt-tokens-details",)
    ),
    "pdserve's own switch is left out": Row(typed=("--share-devices", *_FLAGS), words=("vllm serve /m",)),
    "the config is completed": Row(
        typed=(*_FLAGS, '--kv-transfer-config={"kv_role": "kv_both", "kv_connector_extra_config": {"x": 9}}'),
        config=_VLLM | {"kv_role": "kv_both", "kv_connector_extra_config": {"x": 9}},
    ),
    "the side channel that is set": Row(
        environ={"VLLM_NIXL_SIDE_CHANNEL_PORT": "7000", "VLLM_NIXL_SIDE_CHANNEL_HOST": B},
        variables={"VLLM_NIXL_SIDE_CHANNEL_PORT": "7000", "VLLM_NIXL_SIDE_CHANNEL_HOST": B},
    ),
    "auto is the engine's own": Row(typed=(*_FLAGS, "--connector=auto"), config=_VLLM, variables=_SIDE),
    "push, decode": Row(
        "decode", typed=(*_FLAGS, "--connector", "nixl-push"), variables=_SIDE | {"VLLM_NIXL_SIDE_CHANNEL_HOST": B},
        config=_VLLM | {"kv_connector": "NixlPushConnector", "kv_role": "kv_consumer"},
    ),
    "mooncake, prefill": Row(
        typed=_MOONCAKE, config=_VLLM | {"kv_connector": "MooncakeConnector"},
        variables={"VLLM_HOST_IP": A, "VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998"},
    ),
    "mooncake, decode": Row(
        "decode", typed=_MOONCAKE, environ={"VLLM_MOONCAKE_BOOTSTRAP_PORT": "9998"}, variables={"VLLM_HOST_IP": B},
        config=_VLLM | {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"},
    ),
    "mooncake, the bootstrap port that is set": Row(
        typed=_MOONCAKE, environ={"VLLM_MOONCAKE_BOOTSTRAP_PORT": "9998"},
        variables={"VLLM_HOST_IP": A, "VLLM_MOONCAKE_BOOTSTRAP_PORT": "9998"},
    ),
    "a typed connector has its own ports": Row(
        typed=(*_FLAGS, '--kv-transfer-config={"kv_connector": "MooncakeConnector"}'),
        config=_VLLM | {"kv_connector": "MooncakeConnector"},
        variables={"VLLM_HOST_IP": A, "VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998"},
    ),
    "cores of a CPU": Row(cores=(2, 3, 4, 5), variables=_SIDE | {
        "VLLM_CPU_OMP_THREADS_BIND": "2,3|4,5", "VLLM_CPU_KVCACHE_SPACE": "1",
    }),
    "fewer cores than ranks": Row(cores=(3,), environ={"VLLM_CPU_KVCACHE_SPACE": "4"}, variables=_SIDE | {
        "VLLM_CPU_OMP_THREADS_BIND": "3|3", "VLLM_CPU_KVCACHE_SPACE": "4",
    }),
    "vllm-ascend, prefill": Row(worker="vllm-ascend", sizes=(4, 2), variables={"VLLM_HOST_IP": A}, config={
        "kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_load_failure_policy": "fail",
        "kv_port": 18000, "engine_id": "prefill-0-c0ffee", "kv_connector_extra_config": _ascend((1, 4), (1, 2)),
    }),
    "vllm-ascend, decode": Row("decode", (4, 2), "vllm-ascend", environ={"VLLM_HOST_IP": "h"}, variables={
        "VLLM_HOST_IP": "h",
    }, config={
        "kv_connector": "MooncakeConnectorV1", "kv_role": "kv_consumer", "kv_load_failure_policy": "fail",
        "kv_port": 18000, "engine_id": "decode-0-c0ffee", "kv_connector_extra_config": _ascend((1, 4), (1, 2)),
    }),
    "vllm-ascend, layer-wise": Row(
        "decode", (4, 2), "vllm-ascend", (*_FLAGS, "--connector=ascend-layerwise"), config={
            "kv_connector": "MooncakeLayerwiseConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "fail",
            "kv_port": 18000, "engine_id": "decode-0-c0ffee", "kv_connector_extra_config": _ascend((1, 4), (1, 2)),
        },
    ),
    "vllm-ascend, a typed class of vLLM's name": Row(
        "decode", (2, 2), "vllm-ascend", (*_FLAGS, '--kv-transfer-config={"kv_connector": "MooncakeConnector"}'),
        variables={"VLLM_HOST_IP": B}, num_kv_ports=2, config={
            "kv_connector": "MooncakeConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "fail",
            "kv_port": 18000, "engine_id": "decode-0-c0ffee", "kv_connector_extra_config": _ascend((1, 2), (1, 2)),
        },
    ),
    "vllm-ascend, pipeline stages": Row(
        worker="vllm-ascend", sizes=(4, 2), typed=(*_FLAGS, "-pp", "2"), config={
            "kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_load_failure_policy": "fail",
            "kv_port": 18000, "engine_id": "prefill-0-c0ffee", "kv_connector_extra_config": {
                "prefill": {"dp_size": 1, "tp_size": 2, "pp_size": 2}, "decode": {"dp_size": 1, "tp_size": 2},
            },
        },
    ),
    "vllm-ascend, the other side's sizes are typed": Row(
        worker="vllm-ascend", sizes=(4, 2), typed=(
            *_FLAGS, "-dp", "2", "--kv-transfer-config",
            '{"kv_port": "30000", "kv_connector_extra_config": {"decode": {"dp_size": 2, "tp_size": 1}}}',
        ), config={
            "kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_load_failure_policy": "fail",
            "kv_port": "30000", "engine_id": "prefill-0-c0ffee", "kv_connector_extra_config": _ascend((2, 2), (2, 1)),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_line_follows_from_tables_flags_and_variables(row: Row) -> None:
    line = _line(_plan(row.role, *_of_sizes(*row.sizes, row.worker)), row.typed, row.environ, row.cores)

    text = " ".join(line.argv)
    assert all(words in text for words in row.words)
    assert text.count("--share-devices") == text.count("--model") == text.count("--connector") == 0
    assert line.argv.count("--kv-transfer-config") == 1
    if row.config:
        assert _config(line) == row.config
    if row.variables is not None:
        assert line.variables == row.variables
    if row.num_kv_ports is not None:
        assert len(line.kv_ports) == row.num_kv_ports


@dataclass(frozen=True)
class Wrong:
    """One worker that is refused, and the words of the message."""

    says: str
    typed: tuple[str, ...] = _FLAGS
    worker: WorkerKind = "vllm"
    prefill: tuple[TableServer, ...] = (_server(A, 0, 1),)
    decode: tuple[TableServer, ...] = (_server(A, 2, 3, port=8089),)
    environ: Mapping[str, str] = field(default_factory=dict)


WRONG = [
    Wrong("--model is missing", ("--port=8088",)),
    Wrong("--port is missing", ("--model=/m",)),
    Wrong("--port 80888 is not in 1..65535", ("--model=/m", "--port=80888")),
    Wrong("--port has no value", ("--model=/m", "--port")),
    Wrong("--tensor-parallel-size 'two' is not a whole number above 0", (*_FLAGS, "--tensor-parallel-size", "two")),
    Wrong("--tensor-parallel-size 4 differs from the 2 devices of the local ranktable (0,1)", (*_FLAGS, "-tp=4")),
    Wrong("--tensor-parallel-size 2 x --data-parallel-size 2 differs from the 2", (*_FLAGS, "-tp=2", "-dp", "2")),
    Wrong("use --port 8080 or omit it", prefill=(_server(A, 0, 1, port=8080),)),
    Wrong("--kv-transfer-config '{' is not JSON", (*_FLAGS, "--kv-transfer-config={")),
    Wrong("is not a JSON object", (*_FLAGS, "--kv-transfer-config=[]")),
    Wrong("kv_role 'kv_consumer', but prefill-0 is a kv_producer", (
        *_FLAGS, '--kv-transfer-config={"kv_role": "kv_consumer"}',
    )),
    Wrong("--port 5600 is one of the KV ports of prefill-0, 5600 (VLLM_NIXL_SIDE_CHANNEL_PORT)", (
        "--model=/m", "--port=5600",
    )),
    Wrong("--port 5633 of prefill-0 is a port of decode-0", ("--model=/m", "--port=5633")),
    Wrong("--port 8089 of prefill-0 is a port of decode-0", ("--model=/m", "--port=8089")),
    Wrong("VLLM_NIXL_SIDE_CHANNEL_PORT 5632 of prefill-0 is a port of decode-0 on 10.0.0.18 too "
          "(server_group_list[2].server_list[0])", environ={"VLLM_NIXL_SIDE_CHANNEL_PORT": "5632"}),
    Wrong("VLLM_NIXL_SIDE_CHANNEL_PORT is 'x'", environ={"VLLM_NIXL_SIDE_CHANNEL_PORT": "x"}),
    Wrong("VLLM_MOONCAKE_BOOTSTRAP_PORT is '0'", _MOONCAKE, environ={"VLLM_MOONCAKE_BOOTSTRAP_PORT": "0"}),
    Wrong("--port 8998 is one of the KV ports of prefill-0, 8998 (VLLM_MOONCAKE_BOOTSTRAP_PORT)", (
        *_MOONCAKE, "--port=8998",
    )),
    Wrong("VLLM_MOONCAKE_BOOTSTRAP_PORT 8089 of prefill-0 is a port of decode-0", _MOONCAKE, environ={
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": "8089",
    }),
    Wrong("--connector ascend is not supported for vllm: choose from auto, nixl, nixl-push, mooncake", (
        *_FLAGS, "--connector=ascend",
    )),
    Wrong("--connector has no value", (*_FLAGS, "--connector=")),
    Wrong("--connector nixl is not supported for vllm-ascend: choose from auto, ascend, ascend-layerwise", (
        *_FLAGS, "--connector=nixl",
    ), "vllm-ascend", (_server(A, 0, worker="vllm-ascend"),)),
    Wrong("has the prefill sizes {\"dp_size\": 1, \"tp_size\": 1}", (
        *_FLAGS, '--kv-transfer-config={"kv_connector_extra_config": {"prefill": {"tp_size": 1}}}',
    ), prefill=(_server(A, 0, 1, worker="vllm-ascend"),)),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=[one.says[:50] for one in WRONG])
def test_what_does_not_fit_the_table_is_refused(wrong: Wrong) -> None:
    with pytest.raises(ConfigError) as caught:
        _line(_plan("prefill", wrong.prefill, wrong.decode), wrong.typed, wrong.environ)

    assert wrong.says in str(caught.value)


def test_the_workers_of_one_host_have_different_kv_ports() -> None:
    servers = [_server(A, 0, 1), _server(A, 2), _server(A, 15, 14, 13), _server(A, 3, 12)]
    plans = [_plan("prefill", [one], [_server(B, 0)]) for one in servers]

    ports = [port for plan in plans for port in _line(plan, _FLAGS).kv_ports]
    assert len(set(ports)) == len(ports) == len(servers)


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["--api-key", "s3cret", "other", "--port", "1"], ["--api-key", "(hidden)", "(hidden)", "--port", "1"]),
        (["--hf_token=s3cret", "--tokenizer", "t"], ["--hf_token=(hidden)", "--tokenizer", "t"]),
        (["--hf-token", "--max-num-batched-tokens=1"], ["--hf-token", "--max-num-batched-tokens=1"]),
    ],
)
def test_secret_flags_are_not_printed(typed: list[str], shown: list[str]) -> None:
    assert without_secrets(typed) == shown


def test_the_worker_gets_none_of_pdserves_variables() -> None:
    line = _line(_plan("prefill", [_server(A, 0)], [_server(B, 0)]), _FLAGS)
    clone = __file__.rpartition("/tests/")[0]
    ours = {
        "PDSERVE_API_KEY": "k", "PDSERVE_WORKER": "vllm", "RANK_TABLE_FILE": "t", "PYTHONPATH": f"{clone}:/x",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HOME": "/h",
    }  # fmt: skip

    assert worker_environment(ours, line) == {"PYTHONPATH": "/x", "HF_HOME": "/h", **line.variables}
    assert "PYTHONPATH" not in worker_environment({"PYTHONPATH": clone}, line)


@pytest.mark.parametrize(
    ("command", "words"),
    [("sh -c 'exec vllm' x", ("sh", "-c", "exec vllm", "x")), ("nothing-of-this-name", None), ("'", None)],
)
def test_the_program_is_found_on_the_path(command: str, words: tuple[str, ...] | None) -> None:
    environ = {"PATH": "/bin:/usr/bin", "PDSERVE_VLLM_COMMAND": command}
    if words is None:
        with pytest.raises(ConfigError, match="PDSERVE_VLLM_COMMAND"):
            find_program("vllm", environ)
    else:
        assert find_program("vllm", environ) == words
