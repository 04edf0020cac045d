"""A rank in its own process: how old its step appears as layers finish, and what rank 0 receives when it fails."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from engine.ranks import follower as module
from engine.ranks.follower import Follower
from engine.ranks.message_kinds import RankMessageKind
from engine.ranks.packing import pack_step
from engine.ranks.setup import PoolSetup, RankSetup
from engine.step import BatchSequence, StepBatch
from processes.rank_channel import Channel
from processes.rank_payloads import to_json
from wire.kv_layout import KvTensor

_SETUP = RankSetup("/models/x", "float32", 1, 2, 16, "auto", None, (), 1, 10.0)
_WAIT_S = 300.0
_STEP = pack_step(StepBatch((5, 6), (BatchSequence(0, 2, (1,)),), ()))


def test_a_step_is_as_old_as_its_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leases of a rank's hand-offs are renewed while this is young: a long step must not end them."""
    now, ages = [100.0], []
    part = SimpleNamespace(
        check_held=lambda tensors: None, setup=_SETUP,
        device=SimpleNamespace(traits=SimpleNamespace(pools_on_host=False), make_pool=lambda layout: None),
        make_model=lambda info, pool, graph_rows: Layers(),
    )  # fmt: skip

    class Layers:
        def logits(self, batch: StepBatch, layer_done: Callable[[int], None]) -> None:
            for layer in range(3):
                now[0] += 4.0
                ages.append(follower.step_age())
                layer_done(layer)
                ages.append(follower.step_age())

    follower = _follower(part, now, monkeypatch)

    follower.step(_STEP)

    assert ages == [4.0, 0.0, 4.0, 0.0, 4.0, 0.0]
    now[0] += 50.0
    assert follower.step_age() == 0.0


def test_a_step_on_a_stream_ages_until_its_event_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now, events = [100.0], [SimpleNamespace(is_done=False) for _ in range(2)]
    waiting = iter(events)
    part = SimpleNamespace(
        check_held=lambda tensors: None, setup=_SETUP,
        device=SimpleNamespace(traits=SimpleNamespace(pools_on_host=False), make_pool=lambda layout: None),
        make_model=lambda info, pool, graph_rows: SimpleNamespace(logits=lambda batch, layer_done: layer_done(0)),
    )  # fmt: skip
    follower = _follower(part, now, monkeypatch)
    stream = SimpleNamespace(mark=lambda: next(waiting))
    monkeypatch.setattr(follower, "_reduce", SimpleNamespace(begin=lambda after: None, stream=stream))
    looks: list[float] = []

    def has_message(timeout_s: float) -> bool:
        looks.append(follower.step_age())
        now[0] += 3.0
        events[0].is_done = len(looks) > 1
        return len(looks) > 3

    follower.step(_STEP)
    follower.step(_STEP)
    follower.finish(has_message)

    assert looks == [0.0, 3.0, 0.0, 3.0]  # the second step is as old as the end of the first, and not done
    events[1].is_done = True
    follower.finish(has_message)
    assert follower.step_age() == 0.0
    assert len(looks) == 4


class _Broken:
    """An event after an operation that failed."""

    @property
    def is_done(self) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_a_devices_error_ends_a_rank_that_is_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    part = SimpleNamespace(
        check_held=lambda tensors: None, setup=_SETUP, device=SimpleNamespace(make_pool=lambda layout: None),
        make_model=lambda info, pool, graph_rows: None,
    )  # fmt: skip
    follower = _follower(part, [0.0], monkeypatch)
    follower._launched.append(_Broken())  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match="CUDA error"):
        follower.finish(lambda timeout_s: False)


def _follower(part: SimpleNamespace, now: list[float], monkeypatch: pytest.MonkeyPatch) -> Follower:
    """Return a rank with this part and a pool, whose clock shows `now`."""
    monkeypatch.setattr(module, "load_part", lambda setup, reduce: part)
    monkeypatch.setattr(module, "with_budget", lambda made: made)
    monkeypatch.setattr(module, "part_info", lambda made, layout: None)
    follower = Follower(_SETUP, clock=lambda: now[0])
    follower.take_pool(to_json(PoolSetup((KvTensor(0, "k", 4, 64, "float32"),), 4)), ())
    return follower


_RANK = """
import os, socket, sys
from types import SimpleNamespace
from engine.ranks import follower, process

class Follower:
    part = SimpleNamespace(loaded={})
    pool, step_age = None, None

    def __init__(self, setup): pass
    def take_pool(self, payload, fds): pass
    def connect(self, way, store_fd, marks_fd): pass
    def finish(self, has_message): pass
    def step(self, payload): raise RuntimeError("the device is gone")

class Half:
    def __enter__(self): return self
    def __exit__(self, *_):
        channel = process.Channel(socket.socket(fileno=int(sys.argv[2])), process.RankMessageKind)
        channel.send(8, timeout_s=9)

follower.Follower = Follower
sys.exit(process.main([sys.argv[1], str(os.getppid())], lambda *_: Half()))
"""


@pytest.mark.long
def test_a_ranks_failure_is_reported_before_its_links_close() -> None:
    """Rank 0 sees a closed hand-off at once, and gives a rank a second to send the reason."""
    ours, theirs = socket.socketpair()
    with Channel(ours, RankMessageKind) as channel, theirs:
        fd = os.open("/dev/null", os.O_RDONLY)
        channel.send(RankMessageKind.SETUP, to_json(_SETUP), timeout_s=_WAIT_S)
        channel.send(RankMessageKind.POOL, timeout_s=_WAIT_S)
        channel.send(RankMessageKind.CONNECT, b"gloo", timeout_s=_WAIT_S, fds=(fd, fd))
        channel.send(RankMessageKind.HAND_OFF, timeout_s=_WAIT_S, fds=(fd,))
        channel.send(RankMessageKind.STEP, timeout_s=_WAIT_S)
        os.close(fd)
        # The closing half sends HAND_OFF on a second descriptor of the same socket: messages arrive in the order sent.
        command = [sys.executable, "-c", _RANK, str(theirs.fileno()), str(fd_of_close := os.dup(theirs.fileno()))]
        done = subprocess.run(command, pass_fds=(theirs.fileno(), fd_of_close), timeout=_WAIT_S, check=False)
        os.close(fd_of_close)
        received = [channel.receive(_WAIT_S) for _ in range(5)]

    assert done.returncode == 1
    assert [one.kind for one in received[:3]] == [RankMessageKind.LOADED, RankMessageKind.MAPPED, RankMessageKind.READY]
    assert [one.kind.name for one in received[3:]] == ["FAILED", "HAND_OFF"]
    assert json.loads(received[3].payload)["text"] == "the device is gone"
