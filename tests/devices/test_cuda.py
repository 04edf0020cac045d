"""The calls that capture a GPU's graphs: torch.cuda is replaced by stand-ins with the real signatures."""

import contextlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from devices.cuda import TRAITS, CudaDevice, card_traits


class Stream:
    """Records which stream waits for which."""

    def __init__(self, name: Any, calls: list[str]) -> None:
        self.name, self._calls = str(name), calls

    def wait_stream(self, other: "Stream") -> None:
        self._calls.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recorded calls, in order."""
    calls: list[str] = []
    pools: list[str] = []
    real = inspect.signature(torch.cuda.graph.__init__)

    @contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        calls.append(f"on {entered.name}")
        yield
        calls.append(f"off {entered.name}")

    @contextmanager
    def graph(*args: Any, **kwargs: Any) -> Iterator[None]:
        given = real.bind(None, *args, **kwargs).arguments
        calls.append(f"capture in {given['pool']} on {given['stream'].name}, errors {given['capture_error_mode']}")
        yield
        calls.append("captured")

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    def pool() -> str:
        pools.append("pool")
        return f"pool {len(pools)}"

    main = Stream("main", calls)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(f"side of {device}", calls))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", pool)
    return calls


def test_a_capture_is_warmed_up_on_the_same_stream(calls: list[str]) -> None:
    device = CudaDevice(TRAITS, 3)

    graph = device.capture(lambda: calls.append("run"))
    graph.replay()

    assert device.captures_graphs
    assert calls == [
        "side of cuda:3 waits for main", "on side of cuda:3", "run", "off side of cuda:3",
        "main waits for side of cuda:3", "capture in pool 1 on side of cuda:3, errors thread_local", "run", "captured",
        "replay",
    ]  # fmt: skip


def test_all_captures_share_a_stream_and_a_memory_pool(calls: list[str]) -> None:
    device = CudaDevice(TRAITS, 0)

    graphs = [device.capture(lambda: None) for _ in range(2)]

    assert calls.count("capture in pool 1 on side of cuda:0, errors thread_local") == 2
    del graphs[1]
    graphs.append(device.capture(lambda: None))
    assert calls.count("capture in pool 1 on side of cuda:0, errors thread_local") == 3


@pytest.mark.parametrize("fails", [False, True])
def test_without_graphs_the_next_capture_gets_a_new_pool(fails: bool, calls: list[str]) -> None:
    """torch's allocator refuses one that no graph uses any more: create_or_incref_pool in CUDACachingAllocator.cpp."""
    device = CudaDevice(TRAITS, 0)

    def run() -> None:
        if fails and calls[-1].startswith("capture in"):
            raise RuntimeError("out of memory")

    with contextlib.suppress(RuntimeError):
        device.capture(run)
    device.capture(lambda: None)

    assert [one for one in calls if one.startswith("capture in")] == [
        "capture in pool 1 on side of cuda:0, errors thread_local",
        "capture in pool 2 on side of cuda:0, errors thread_local",
    ]


def test_a_graph_takes_no_lists_from_the_host(calls: list[str]) -> None:
    graph = CudaDevice(TRAITS, 0).capture(lambda: None)

    graph.replay({})
    with pytest.raises(ValueError, match="actual_lengths"):
        graph.replay({"actual_lengths": [3]})
    assert calls.count("replay") == 1


@pytest.mark.parametrize(
    ("capability", "float8"),
    [
        ((8, 0), []),
        ((8, 9), ["float8"]),
        ((9, 0), ["float8", "float8-blocks", "experts-float8"]),
        ((10, 0), ["float8", "experts-float8"]),
        ((12, 0), ["float8"]),
    ],
)
def test_float8_layers_stay_so_on_cards_that_multiply_them(capability: tuple[int, int], float8: list[str]) -> None:
    kept = card_traits(capability).kept_linears

    others = ["int4pack", "int8", "int8-static", "widened", "experts-widened"]
    assert [name for name in kept if "float8" in name] == float8
    assert [name for name in kept if "float8" not in name] == others


def test_the_description_has_the_driver_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 141 << 30))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("devices.versions.cuda_versions", lambda cuda: {"driver": "580.1", "CUDA": cuda})

    device = CudaDevice(TRAITS, 1)

    assert device.describe() == f"cuda:1: card 1, 141 GiB, torch {torch.__version__}, CUDA 13.0, driver 580.1"
    assert device.memory().free == 3 << 30
