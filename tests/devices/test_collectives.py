"""Process groups by name: which device kind uses which, the variables set for HCCL, and how its group is made."""

import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from devices import cuda, table
from devices.collectives import (
    COLLECTIVES,
    HCCL_DEFAULTS,
    NCCL_DEFAULTS,
    collective_of,
    set_hccl_defaults,
    set_nccl_defaults,
)
from devices.npu import TRAITS
from tests.devices.fake_device import FakeDevice, FakeKind


def test_a_kind_uses_the_collective_named_in_its_traits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.KINDS, "fake", FakeKind())

    found = [collective_of(device) for device in ("cpu", "cuda:1", "npu:0", "fake:2", "tpu:0")]

    assert [None if one is None else one.name for one in found] == ["gloo", "nccl", "hccl", "gloo", None]
    assert all(kind.traits.collective in COLLECTIVES for kind in table.KINDS.values())


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_link_of_every_library_can_be_ended_alone(name: str) -> None:
    """Else a peer that hangs could hold up the sums of ranks, which share the device with their links, forever."""
    assert COLLECTIVES[name].abort is not None or COLLECTIVES[name].own_process


def test_hccl_defaults_keep_variables_set_by_the_user() -> None:
    environ = {"HCCL_CONNECT_TIMEOUT": "600"}

    set_hccl_defaults(environ)

    assert environ == {**HCCL_DEFAULTS, "HCCL_CONNECT_TIMEOUT": "600"}


@pytest.mark.parametrize(("requested", "connect_s"), [(None, 200.0), ("60", 200.0), ("600", 680.0), ("soon", 200.0)])
def test_ranks_wait_for_each_other_longer_than_hccl_does(requested: str | None, connect_s: float) -> None:
    environ = {} if requested is None else {"HCCL_CONNECT_TIMEOUT": requested}

    assert COLLECTIVES["hccl"].connect_s(environ) == connect_s
    assert COLLECTIVES["gloo"].connect_s(environ) == 60.0


def test_torch_reads_every_nccl_variable_by_our_name() -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    text = header.read_text(encoding="utf-8")

    unread = [name for name in NCCL_DEFAULTS if name.startswith("TORCH_") and f'"{name}"' not in text]
    assert unread == ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]
    assert "NoHandling = 0" in text
    assert "int nccl_nonblocking_timeout();" in (header.parent / "NCCLUtils.hpp").read_text(encoding="utf-8")


@pytest.mark.parametrize(("host", "interface"), [("127.0.0.1", "lo"), ("10.0.0.7", None)])
def test_an_nccl_failure_ends_no_process(host: str, interface: str | None) -> None:
    environ: dict[str, str] = {}
    fields = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_SOCKET_IFNAME": "eth1"}
    kept = dict(fields)

    set_nccl_defaults(environ, host)
    set_nccl_defaults(kept, host)

    assert environ == {**NCCL_DEFAULTS, **({} if interface is None else {"NCCL_SOCKET_IFNAME": interface})}
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert kept == {**NCCL_DEFAULTS, **fields}


@dataclass
class Options:
    """Options of a stand-in for ProcessGroupHCCL and ProcessGroupNCCL."""

    _timeout: timedelta = timedelta(minutes=30)
    is_high_priority_stream: bool = False
    config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(blocking=1))


@dataclass
class Made:
    """The arguments that the stand-in was made with."""

    store: object
    rank: int
    of: int
    options: Options
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass
class ActivatedKind(FakeKind):
    """Records which of its devices were activated."""

    activated: list[int] = field(default_factory=list)

    def open(self, index: int = 0) -> FakeDevice:
        activated = self.activated

        class Device(FakeDevice):
            def activate(self) -> None:
                activated.append(self.index)

        return Device(index, self.traits, self.total_bytes)


@pytest.mark.parametrize("is_link", [True, False])
def test_an_nccl_group_has_its_device_variables_and_torchs_timeout(
    is_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timeout below our deadlines would end first, and a sum that it ends counts as complete."""
    kind = ActivatedKind(cuda.TRAITS)
    monkeypatch.setattr(
        "torch.distributed.ProcessGroupNCCL", type("Nccl", (Made,), {"Options": Options}), raising=False
    )
    monkeypatch.setitem(table.KINDS, "cuda", kind)
    monkeypatch.setattr(os, "environ", {})

    nccl = COLLECTIVES["nccl"]
    group = (nccl.make_link if is_link else nccl.make)(object(), 0, 2, "127.0.0.1", 2.5, "cuda:1")  # type: ignore[misc]

    with nccl.new_stream("cuda:1")():
        pass
    assert (group.options.config.blocking, group.options.is_high_priority_stream) == (
        (0, True) if is_link else (1, False)
    )
    assert int(NCCL_DEFAULTS["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) + 1 == nccl.make_s
    assert group.options._timeout == Options()._timeout
    assert group.environ == {**NCCL_DEFAULTS, "NCCL_SOCKET_IFNAME": "lo"}
    assert kind.activated == [1]


def test_an_hccl_group_is_made_on_its_device_with_the_variables_set(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = ModuleType("torch_npu._C._distributed_c10d")
    c10d.ProcessGroupHCCL = type("ProcessGroupHCCL", (Made,), {"Options": Options})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, c10d.__name__, c10d)
    kind = ActivatedKind(TRAITS)
    monkeypatch.setitem(table.KINDS, "npu", kind)
    for name in HCCL_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))

    store = object()
    group = COLLECTIVES["hccl"].make(store, 1, 2, "10.0.0.7", 2.5, "npu:3")

    assert (group.store, group.rank, group.of, group.options._timeout) == (store, 1, 2, Options()._timeout)
    assert kind.activated == [3]
    assert {name: group.environ[name] for name in HCCL_DEFAULTS} == HCCL_DEFAULTS
    assert COLLECTIVES["hccl"].lacking() is None
    assert COLLECTIVES["hccl"].free_bytes("npu:3") == 1 << 30
