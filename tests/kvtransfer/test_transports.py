"""The table of transports: order, defaults, and what is refused with a message."""

import re

import pytest

from kvtransfer import mooncake_engine
from kvtransfer.transports import DEFAULT_NAMES, NAMES, make_transports, need_port
from tests.kvtransfer.rig import TENSORS, Pool
from wire.errors import ConfigError
from wire.kv_layout import PoolLayout


@pytest.fixture
def pool() -> Pool:
    return Pool(PoolLayout(TENSORS, num_blocks=4, block_size=4))


def test_transports_are_tried_best_first_whatever_the_typed_order(pool: Pool) -> None:
    assert [transport.traits.name for transport in make_transports(("tcp", "shm"), pool)] == ["shm", "tcp"]


def test_none_named_means_the_default_ones(pool: Pool) -> None:
    assert [transport.traits.name for transport in make_transports((), pool)] == ["shm", "tcp"]
    assert set(DEFAULT_NAMES) - {"shm", "tcp"} == {"cuda_ipc"}  # which has no use for a pool of host memory


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
