"""Which transports an instance offers, and the message for one that it lacks."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from devices.collectives import COLLECTIVES
from instance.build import build_engine
from instance.offered_transports import check_named, describe_transports, warn_of_settings, warn_of_slow_set_up
from kvtransfer.mooncake import MooncakeTransport
from tests.instance.pair import instance_config
from wire.errors import ConfigError
from wire.kv_layout import Rank
from wire.types import Role

NCCL, HCCL = (f"TORCH_{name}_ASYNC_ERROR_HANDLING" for name in ("NCCL", "HCCL"))
ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
EXITS = (
    'failed_operation_exits setting=%s consequence="a peer that dies ends this process, not only its link; 0, the '
    'default, prevents that"'
)
RACES = (
    f'launches_race setting={ORDER}=1 consequence="sums over ranks and KV links are launched by two threads, and '
    'operations of either may fail; 0, the default, prevents that"'
)
UNNAMED = tuple(f"{name}: not named in --kv-transport" for name in ("cuda_ipc", "shm"))


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ((), ("cuda_ipc: the KV pool is host memory", "shm", "tcp")),
        (("tcp",), (*UNNAMED, "tcp")),
        (("tcp", "process_group"), (*UNNAMED, "process_group", "tcp")),
    ],
)
def test_default_and_named_transports_are_listed_best_first(
    named: tuple[str, ...], expected: tuple[str, ...], tmp_path: Path
) -> None:
    engine, _ = build_engine(instance_config(tmp_path, Role.PREFILL, port=1), print)
    try:
        assert describe_transports(named, engine.memories[0]) == expected
    finally:
        engine.close()


def test_a_requested_transport_that_is_missing_is_refused_with_advice(tmp_path: Path) -> None:
    engine, _ = build_engine(instance_config(tmp_path, Role.PREFILL, port=1), print)
    try:
        check_named(("shm", "tcp"), engine.memories[0])
        with pytest.raises(ConfigError) as caught:
            check_named(("tcp", "cuda_ipc"), engine.memories[0])
    finally:
        engine.close()

    assert str(caught.value) == (
        "--kv-transport cuda_ipc: the KV pool is host memory; leave cuda_ipc, which moves KV between the GPUs of a "
        "host, out of --kv-transport on this machine"
    )


@pytest.mark.parametrize(
    ("device", "named", "num_ranks", "environ", "warning"),
    [
        ("cuda:0", ("process_group",), 1, {NCCL: "3"}, EXITS % f"{NCCL}=3"), ("npu:0", ("hccl",), 1, {HCCL: "1"}, None),
        ("npu:0", ("tcp",), 2, {HCCL: " 3 "}, EXITS % f"{HCCL}=3"), ("npu:0", ("tcp",), 1, {HCCL: "1"}, None),
        ("cuda:0", ("process_group",), 1, {NCCL: "0"}, None), ("cuda:0", ("process_group",), 1, {NCCL: "2"}, None),
        ("cuda:0", ("process_group",), 1, {HCCL: "1"}, None), ("cpu", ("process_group",), 2, {NCCL: "3"}, None),
        ("npu:0", ("hccl",), 1, {}, None), ("cuda:0", ("nccl",), 2, {ORDER: "1"}, RACES),
        ("cuda:0", ("nccl",), 2, {ORDER: "0"}, None), ("cuda:0", ("nccl",), 1, {ORDER: "1"}, None),
        ("cuda:0", ("tcp",), 2, {ORDER: "1"}, None), ("npu:0", ("hccl",), 2, {ORDER: "1"}, None),
    ],
)  # fmt: skip
def test_a_variable_that_fails_operations_or_the_process_is_reported(
    device: str, named: tuple[str, ...], num_ranks: int, environ: dict[str, str], warning: str | None,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for name in ("nccl", "hccl"):  # here as if the library and the card were there
        monkeypatch.setitem(COLLECTIVES, name, replace(COLLECTIVES[name], lacking=lambda: None))
    memory = SimpleNamespace(device=device, layout=SimpleNamespace(rank=Rank(0, num_ranks)))

    warn_of_settings(named, memory, num_ranks, environ)

    assert [line for line in caplog.messages if " setting=" in line] == ([] if warning is None else [warning])


@pytest.mark.parametrize(
    ("device", "named", "waits"),
    [
        ("npu:0", ("ascend", "hccl"), "library=hccl seconds=160"), ("cuda:0", ("nccl",), "library=nccl seconds=15"),
        ("npu:0", ("ascend", "hccl", "tcp"), None), ("npu:0", ("hccl", "tcp"), None), ("npu:0", ("tcp",), None),
        ("cpu", ("process_group",), None),
    ],
)  # fmt: skip
def test_prompts_that_wait_for_a_slow_set_up_are_reported(
    device: str, named: tuple[str, ...], waits: str | None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for name in ("nccl", "hccl"):
        monkeypatch.setitem(COLLECTIVES, name, replace(COLLECTIVES[name], lacking=lambda: None))
    monkeypatch.setattr(MooncakeTransport, "unusable", lambda self: None)
    memory = SimpleNamespace(device=device, layout=SimpleNamespace(rank=Rank(0, 1)))

    warn_of_slow_set_up(named, memory)

    lines = [line for line in caplog.messages if line.startswith("kv_waits_for_set_up ")]
    assert len(lines) == (waits is not None)
    assert all(f" {waits} " in line and "add tcp to --kv-transport" in line for line in lines)
