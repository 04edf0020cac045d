"""The process of a rank other than 0: it loads its slices, then runs the steps that rank 0 sends.

python -P -m engine.ranks.process CHANNEL_FD PARENT_PID     (ranks on devices: instance.rank_process)

It lives as long as rank 0's process: when that ends, the kernel kills this one and its socket closes. It ignores
signals of the terminal and of the process group, which rank 0 handles.
"""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from devices.interface import Memory
from engine.ranks.message_kinds import RankMessageKind
from engine.ranks.setup import RankSetup
from engine.torch_start import loading, prepare_torch
from native.ticker import start_ticker
from processes.child_limits import end_with
from processes.rank_channel import Channel, ChannelClosed, Message
from processes.rank_payloads import from_json, pack_error, to_json
from telemetry.logs import EventLogger, configure

_log = EventLogger("engine")

_SETUP_S = 60.0
_SEND_S = 10.0


HandOff = Callable[[Memory, bytes, int, Callable[[], float]], AbstractContextManager[object]]
"""Makes the context that sends and receives a rank's KV: from its pool, the settings and the socket from rank 0, and a
function that returns the age of the running step."""


def main(argv: Sequence[str], hand_off: HandOff | None = None) -> int:
    """Serve one rank; return the exit status. Without `hand_off` rank 0 moves the KV of this rank too."""
    channel = Channel(socket.socket(fileno=int(argv[0])), RankMessageKind)
    end_with(int(argv[1]))  # rank 0's thread that started this process outlives it
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.ExitStack() as on_exit:  # rank 0 gets the error before it sees the hand-off close
        try:
            setup = from_json(RankSetup, _receive_kind(channel, RankMessageKind.SETUP, _SETUP_S).payload)
            configure(setup.log_level, log_format=setup.log_format)
            _run(channel, setup, hand_off, on_exit)
        except ChannelClosed:
            return 0
        except Exception as error:  # noqa: BLE001 - the process's outermost frame: rank 0 reports the error
            with contextlib.suppress(OSError):
                channel.send(RankMessageKind.FAILED, pack_error(error), timeout_s=_SEND_S)
            return 1


def _run(
    channel: Channel[RankMessageKind], setup: RankSetup, hand_off: HandOff | None, on_exit: contextlib.ExitStack
) -> NoReturn:  # fmt: skip
    """Serve until the channel closes, which raises ChannelClosed. All other errors pass through."""
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)  # before torch starts threads: they inherit the cores
    prepare_torch(setup.num_threads)
    start_ticker()
    with loading():
        from engine.ranks.follower import Follower

        follower = Follower(setup)
        channel.send(RankMessageKind.LOADED, to_json(follower.part.loaded), timeout_s=_SEND_S)
    pool = channel.receive(None)
    follower.take_pool(pool.payload, pool.fds)
    channel.send(RankMessageKind.MAPPED, timeout_s=_SEND_S)
    connect = channel.receive(None)
    follower.connect(connect.payload.decode(), *connect.fds)
    channel.send(RankMessageKind.READY, timeout_s=_SEND_S)
    while True:
        follower.finish(channel.has_more)
        message = channel.receive(None)
        if message.kind == RankMessageKind.HAND_OFF and hand_off is not None:
            on_exit.enter_context(hand_off(follower.pool, message.payload, message.fds[0], follower.step_age))
        else:
            _handle_message(follower, message, channel)


def _handle_message(follower: Any, message: Message[RankMessageKind], channel: Channel[RankMessageKind]) -> None:
    if message.kind == RankMessageKind.STEP:
        follower.step(message.payload)
    elif message.kind == RankMessageKind.CAPTURE:
        _capture(follower, message.payload, channel)
    elif message.kind == RankMessageKind.DROP:
        follower.drop(message.payload)
    elif message.kind in (RankMessageKind.COPY, RankMessageKind.SAVE, RankMessageKind.LOAD):
        follower.copy(message.kind, message.payload)
    else:
        raise ValueError(f"unexpected message {message.kind.name} to a serving rank")


def _capture(follower: Any, payload: bytes, channel: Channel[RankMessageKind]) -> None:
    """Capture a graph in the two rounds of graph_capture.py, with a report after each."""

    def agree() -> bool:
        channel.send(RankMessageKind.CAPTURED, timeout_s=_SEND_S)
        return channel.receive(None).kind == RankMessageKind.CAPTURE

    failure = follower.capture(payload, agree)
    if failure is not None:
        channel.send(RankMessageKind.CAPTURED, failure, timeout_s=_SEND_S)


def _receive_kind(
    channel: Channel[RankMessageKind], kind: RankMessageKind, timeout_s: float
) -> Message[RankMessageKind]:
    message = channel.receive(timeout_s)
    if message.kind != kind:
        raise ValueError(f"{message.kind.name} was received where {kind.name} was expected")
    return message


def leave(status: int) -> NoReturn:
    """Exit at once: torch's cleanup takes seconds on a busy machine, and rank 0 waits two seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
