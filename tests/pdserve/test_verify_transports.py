"""Which transports `pdserve verify` runs: what the machine has, and words for what it lacks."""

import pytest

from kvtransfer import transports
from kvtransfer.tcp import TcpTransport
from kvtransfer.transports import NAMES
from pdserve.verify_transports import EACH, choose
from wire.errors import ConfigError


class _Absent(TcpTransport):
    def unusable(self) -> str | None:
        return "its package is not installed"


def test_each_is_every_transport_or_its_reason() -> None:
    chosen = choose(EACH)

    assert {*chosen.names, *chosen.lacking} == set(NAMES)
    assert {"shm", "tcp"} <= set(chosen.names)
    assert all(chosen.lacking.values())


def test_one_that_is_absent_is_named_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transports._MAKERS, "tcp", _Absent)

    chosen = choose(EACH, ("shm", "tcp"))

    assert (chosen.names, chosen.lacking) == (("shm",), {"tcp": "its package is not installed"})
    assert choose("shm").names == ("shm",)
    with pytest.raises(ConfigError, match="--transport tcp cannot run here: its package is not installed"):
        choose("tcp")
    with pytest.raises(ConfigError, match="no transport can run here: tcp: its package"):
        choose(EACH, ("tcp",))
