"""Make the group of one link: both ends run this at once on the link's threads, after WELCOME and before READY.

    sender    TERMS ->                    checks that both make the same kind of group
    leader    ASK ->     <- GRANTED|BUSY  both hold the turn of their device: nothing else is made there meanwhile
    both      KEY ...                     the group's store, on the issuing thread
    both                                  one operation proves the pair; the turn ends after it if it makes the
                                          communicator, else before it
    both      DONE

A turn ends after twice the connect timeout, or twice what the collective asks for its making; a creation that runs
then ends within that once more. A peer that stops in the middle of a set-up keeps other links of the device waiting so
long, and not for the progress timeout.

The leader is the end whose (instance, epoch, rank) is less. It takes its own turn first, then asks; the other end
tries for a short slice and says BUSY, upon which the leader lets go. So A -> B, B -> C, C -> A never wait in a circle.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from devices.collectives import Collective, torch_version
from kvtransfer.frame import WireError
from kvtransfer.hello import Hello
from kvtransfer.process_group.devices import GroupDevice, Lease
from kvtransfer.process_group.exchange import SetupExchange, Word
from kvtransfer.process_group.group import Group, in_one_line
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport import Timeouts
from wire.errors import Unavailable

if TYPE_CHECKING:
    from kvtransfer.process_group.payload import GroupStaging

SENDER, RECEIVER = 0, 1
_RANKS = 2
_SLICE_S = 0.2
_TURN = 2  # connect timeouts: one to hear of the turn, one to use it
_MAX_PAUSE_MS = 20
_PROOF_BYTES = 16


def make_group(
    stream: Stream,
    hello: Hello,
    rank: int,
    collective: Collective,
    lease: Lease,
    staging: "GroupStaging",
    timeouts: Timeouts,
) -> Group:
    """Return this end's group, proven to reach the other. Raises LinkLost, WireError, Unavailable.

    The lease is the group's afterwards; when this raises it is given back.
    """
    exchange, give_up = SetupExchange(stream, group_name(hello)), lease.release
    timeouts = replace(timeouts, connect_s=max(timeouts.connect_s, collective.make_s))
    try:
        _agree(exchange, collective, rank, timeouts)
        with _turn(exchange, lease.device, _leads(hello, rank), timeouts) as end:
            _refuse_if_full(collective, lease.device.name)
            made = _make(exchange, stream, rank, collective, lease.device, timeouts, end)
            group = Group(
                made, collective, lease, name=f"{hello.sender_id}-{hello.receiver_id}-{hello.link_epoch:x}",
                peer=1 - rank, progress_s=timeouts.progress_s, keep=staging,
            )  # fmt: skip
            give_up = group.close
            del made  # the group alone keeps it
            if collective.lazy:
                _prove(group, staging, hello, rank, max(0.0, end - time.monotonic()))
        if not collective.lazy:
            _prove(group, staging, hello, rank, timeouts.progress_s)
        exchange.finish(timeouts.progress_s)
    except (RuntimeError, TimeoutError) as error:
        give_up()
        raise LinkLost(f"no {collective.name} group: {in_one_line(error)}") from error
    except BaseException:
        give_up()
        raise
    return group


def group_name(hello: Hello) -> str:
    """Return what keeps this group apart from all others: the instances, their epochs, the link's and its nonce."""
    identity = (
        f"{hello.sender_id}|{hello.sender_epoch}|{hello.sender_rank}|{hello.receiver_id}|{hello.receiver_epoch}|"
        f"{hello.receiver_rank}|{hello.link_epoch}|{hello.nonce.hex()}"
    )
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def _agree(exchange: SetupExchange, collective: Collective, rank: int, timeouts: Timeouts) -> None:
    mine = f"{collective.name} of torch {torch_version()}"
    if rank == SENDER:
        exchange.say(Word.TERMS, mine.encode())
        return
    theirs = exchange.hear([Word.TERMS], timeouts.progress_s)[1].decode("utf-8", "replace")
    if theirs != mine:
        raise Unavailable(f"groups are made by {mine} here, by {theirs[:200]} there")


def _leads(hello: Hello, rank: int) -> bool:
    sender = (hello.sender_id, hello.sender_epoch, hello.sender_rank)
    receiver = (hello.receiver_id, hello.receiver_epoch, hello.receiver_rank)
    if sender == receiver:
        raise Unavailable(f"{hello.sender_id} cannot make a group with itself")
    return (sender < receiver) == (rank == SENDER)


@contextmanager
def _turn(exchange: SetupExchange, device: GroupDevice, leads: bool, timeouts: Timeouts) -> Iterator[float]:
    """Hold the device's turn, which is to be over at the time yielded."""
    take = _lead if leads else _follow
    end = take(exchange, device, timeouts, time.monotonic() + timeouts.progress_s)
    try:
        yield end
    finally:
        device.making.release()


def _lead(exchange: SetupExchange, device: GroupDevice, timeouts: Timeouts, deadline: float) -> float:
    while device.making.acquire(timeout=max(0.0, deadline - time.monotonic())):
        end = time.monotonic() + _TURN * timeouts.connect_s
        try:
            exchange.say(Word.ASK)
            word, _ = exchange.hear([Word.GRANTED, Word.BUSY], timeouts.connect_s + _SLICE_S)
        except BaseException:
            device.making.release()
            raise
        if word is Word.GRANTED:
            return end
        device.making.release()
        time.sleep(secrets.randbelow(_MAX_PAUSE_MS) / 1000)  # let the links go first that hold the other end
    raise LinkLost(f"no turn to make a group on {device.name} within {timeouts.progress_s:g} s")


def _follow(exchange: SetupExchange, device: GroupDevice, timeouts: Timeouts, deadline: float) -> float:
    while True:
        exchange.hear([Word.ASK], max(0.0, deadline - time.monotonic()))
        if device.making.acquire(timeout=_SLICE_S):
            break
        exchange.say(Word.BUSY)
    end = time.monotonic() + _TURN * timeouts.connect_s
    try:
        exchange.say(Word.GRANTED)
    except BaseException:
        device.making.release()
        raise
    return end


def _refuse_if_full(collective: Collective, device: str) -> None:
    needed, free = collective.link_bytes(os.environ), collective.free_bytes(device)
    if free is not None and free < needed:
        raise Unavailable(f"a link over {collective.name} takes {needed} bytes of {device}, {free} are free")


def _make(
    exchange: SetupExchange,
    stream: Stream,
    rank: int,
    collective: Collective,
    device: GroupDevice,
    timeouts: Timeouts,
    end: float,
) -> Any:
    from kvtransfer.process_group.store import LinkStore

    host = stream.socket.getsockname()[0]

    def make() -> Any:
        exchange.deadline = min(end, time.monotonic() + timeouts.connect_s)
        return collective.make(LinkStore(exchange), rank, _RANKS, host, timeouts.connect_s, device.name)

    made = device.issue(make)
    try:
        return made.result(max(0.0, end - time.monotonic()))
    except TimeoutError:
        if made.cancel():
            raise LinkLost(f"{device.name} issued nothing within its turn") from None
        return made.result(_TURN * timeouts.connect_s)  # it runs: its keys and its connection have one each at most


def _prove(group: Group, staging: "GroupStaging", hello: Hello, rank: int, timeout_s: float) -> None:
    """Pass the link's nonce through the group: it leads to this peer, and its communicator stands from now on."""
    if rank == SENDER:
        staging.write(0, hello.nonce)
        group.send(staging.tensor(0, _PROOF_BYTES)).result(timeout_s)
        return
    group.receive(staging, _PROOF_BYTES).result(timeout_s)
    if staging.read(0, _PROOF_BYTES) != hello.nonce:
        raise WireError("the group leads to another peer than the link")
