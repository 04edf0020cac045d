"""A rank other than 0, as a process: it loads its slices, and then steps whenever rank 0 says so.

python -P -m engine.ranks.process CHANNEL_FD PARENT_PID

It lives as long as rank 0's process: the kernel kills it when that ends, and its socket closes. Signals of the terminal
and of a process group are rank 0's to answer.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from engine.ranks.channel import Channel, ChannelClosed, Kind, Message
from engine.ranks.setup import RankSetup
from engine.torch_start import loading, prepare_torch
from telemetry.logs import EventLogger, configure

log = EventLogger("engine")

_SETUP_S = 60.0
_SAY_S = 10.0
_PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h


def main(argv: Sequence[str]) -> int:
    """Serve one rank; return the exit status."""
    channel = Channel(socket.socket(fileno=int(argv[0])))
    _end_with(int(argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        setup = RankSetup.from_json(_expect(channel, Kind.SETUP, _SETUP_S).payload)
        configure(setup.log_level, log_format=setup.log_format)
        _run(channel, setup)
    except ChannelClosed:
        return 0
    except Exception as error:  # noqa: BLE001 - the process's outermost frame: rank 0 says it in its own words
        with contextlib.suppress(OSError):
            reason = {"error": type(error).__name__, "text": str(error)}
            channel.send(Kind.FAILED, json.dumps(reason).encode(), timeout_s=_SAY_S)
        return 1
    return 0


def _run(channel: Channel, setup: RankSetup) -> None:
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)  # before torch starts threads: they inherit it
    prepare_torch(setup.num_threads)
    with loading():
        from engine.ranks.follower import Follower

        follower = Follower(setup)
        channel.send(Kind.LOADED, follower.part.loaded.to_json(), timeout_s=_SAY_S)
    pool = channel.receive(None)
    follower.take_pool(pool.payload, pool.fds[0])
    channel.send(Kind.MAPPED, timeout_s=_SAY_S)
    connect = channel.receive(None)
    follower.connect(connect.payload.decode(), *connect.fds)
    channel.send(Kind.READY, timeout_s=_SAY_S)
    while True:
        _obey(follower, channel.receive(None))


def _obey(follower: Any, message: Message) -> None:
    if message.kind == Kind.STEP:
        follower.step(message.payload)
    elif message.kind in (Kind.COPY, Kind.SAVE, Kind.LOAD):
        follower.copy(message.kind, message.payload)
    else:
        raise ValueError(f"a rank that serves is not told {message.kind.name}")


def _expect(channel: Channel, kind: Kind, timeout_s: float) -> Message:
    message = channel.receive(timeout_s)
    if message.kind != kind:
        raise ValueError(f"{message.kind.name} came where {kind.name} was due")
    return message


def _end_with(parent: int) -> None:
    """Let the kernel kill this process with the thread of rank 0 that started it, which lives as long as it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we could ask
        sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
