"""The table of transports: order, defaults, and what is refused with a message."""

import re
from dataclasses import replace

import pytest

from devices.collectives import COLLECTIVES
from kvtransfer import mooncake_engine
from kvtransfer.transport_interface import Timeouts
from kvtransfer.transport_table import LIBRARIES, NAMES, TRAITS, default_names, make_transports, need_port
from tests.kvtransfer.rig import TENSORS, Pool
from wire.errors import ConfigError
from wire.kv_layout import PoolLayout, Rank


@pytest.fixture
def pool() -> Pool:
    return Pool(PoolLayout(TENSORS, num_blocks=4, block_size=4))


def test_transports_are_tried_best_first_whatever_the_typed_order(pool: Pool) -> None:
    assert [transport.traits.name for transport in make_transports(("tcp", "shm"), pool)] == ["shm", "tcp"]


def test_none_named_means_the_default_ones(pool: Pool) -> None:
    assert [transport.traits.name for transport in make_transports((), pool)] == ["shm", "tcp"]
    assert default_names("cpu") == ("cuda_ipc", "shm", "tcp")  # the first has no use for a pool of host memory
    assert default_names("npu:0") == ("cuda_ipc", "shm", "process_group", "tcp")
    assert default_names("cuda:1") == ("cuda_ipc", "shm", "process_group", "tcp")  # mooncake listens on all interfaces
    assert [name for name, traits in TRAITS.items() if traits.measured_first] == ["mooncake"]


@pytest.mark.parametrize(("device", "names"), [("cuda:0", ["mooncake", "tcp"]), ("npu:0", ["tcp"])])
def test_transports_that_copy_a_devices_kv_through_the_host(device: str, names: list[str]) -> None:
    assert [name for name, traits in TRAITS.items() if traits.through_host(device)] == names


@pytest.mark.parametrize(("device", "slow"), [("cpu", []), ("cuda:0", ["process_group"]), ("npu:0", ["process_group"])])
def test_the_set_up_of_a_devices_communicator_is_slow(device: str, slow: list[str]) -> None:
    assert [name for name, traits in TRAITS.items() if traits.is_slow(device)] == slow


@pytest.mark.parametrize(("device", "value", "own"), [
    ("cpu", "nccl", "gloo"), ("npu:0", "nccl", "hccl"), ("cuda:0", "hccl", "nccl"), ("cuda:0", "ascend", "tcp"),
])  # fmt: skip
def test_a_library_that_the_device_lacks_is_refused(device: str, value: str, own: str, pool: Pool) -> None:
    pool.device = device  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match=f"^--kv-transport {value}: a KV pool on {device} uses {own}$"):
        make_transports((value,), pool)


@pytest.mark.parametrize(("device", "value"), [("npu:0", "hccl"), ("cuda:0", "nccl")])
def test_a_library_names_its_transport(device: str, value: str, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.device = device  # type: ignore[attr-defined]
    monkeypatch.setitem(COLLECTIVES, value, replace(COLLECTIVES[value], lacking=lambda: None))

    assert [transport.traits.name for transport in make_transports(("tcp", value), pool)] == ["process_group", "tcp"]
    assert dict.fromkeys(("gloo", "nccl", "hccl"), "process_group") | {"ascend": "mooncake"} == LIBRARIES
    assert need_port((value,))


@pytest.mark.parametrize("named", [(), ("nccl",)])
def test_links_use_the_library_of_the_ranks_sums(named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLLECTIVES, "nccl", replace(COLLECTIVES["nccl"], lacking=lambda: None))
    pool = Pool(PoolLayout(TENSORS, num_blocks=4, block_size=4, rank=Rank(0, 2)))
    pool.device = "cuda:0"  # type: ignore[attr-defined]

    assert "process_group" in [transport.traits.name for transport in make_transports(named, pool)]


@pytest.mark.parametrize(("timeouts", "operation_s"), [
    (Timeouts(), 10.0), (Timeouts(step_s=10.0), 5.0), (Timeouts(step_s=60.0), 10.0), (Timeouts(progress_s=2.0), 2.0),
])  # fmt: skip
def test_an_operation_ends_before_a_step_that_waits_for_it(timeouts: Timeouts, operation_s: float) -> None:
    assert timeouts.operation_s == operation_s


def test_transports_within_one_host_need_no_port() -> None:
    assert [name for name in NAMES if not need_port((name,))] == ["cuda_ipc", "shm"]
    assert need_port(())


def test_an_unknown_name_is_refused_with_the_known_ones(pool: Pool) -> None:
    with pytest.raises(ConfigError, match=r"'carrier_pigeon' is not one of cuda_ipc, shm, "):
        make_transports(("carrier_pigeon",), pool)


def test_mooncake_absent_is_a_clear_message(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.mooncake.lacking", lambda _: "the package mooncake is missing: pip install it")

    with pytest.raises(ConfigError, match="--kv-transport mooncake: the package mooncake is missing: pip install it"):
        make_transports(("mooncake", "tcp"), pool)


@pytest.mark.parametrize(("message", "words"), [
    ("libibverbs.so.1: cannot open shared object file", "install Debian's libibverbs1"),
    ("No module named 'mooncake'", "scripts/install --with mooncake"),
])  # fmt: skip
def test_missing_parts_of_mooncake_are_named(message: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> object:
        assert name == "mooncake.engine"
        raise ImportError(message)

    monkeypatch.setattr("kvtransfer.mooncake_engine.importlib.import_module", refuse)

    assert re.search(words, str(mooncake_engine.lacking.__wrapped__()))


@pytest.mark.parametrize(("package", "reason"), [
    ("mooncake-transfer-engine-npu", "the package mooncake-transfer-engine-non-cuda reads host memory only: "
     "pip install mooncake-transfer-engine-npu in its place"),
    ("mooncake-transfer-engine-non-cuda", None),
])  # fmt: skip
def test_a_mooncake_for_host_memory_reads_no_device(
    package: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_engine, "_package", object)
    monkeypatch.setattr(mooncake_engine, "is_installed", lambda name: name == "mooncake-transfer-engine-non-cuda")

    assert mooncake_engine.lacking.__wrapped__(package) == reason
