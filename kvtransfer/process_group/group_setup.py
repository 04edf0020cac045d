"""Make the group of one link: both ends run this on the link's threads, after WELCOME and before READY.

    sender    TERMS ->                    checks that both make the same kind of group
    leader    TURN ->    <- GRANTED|BUSY  both hold the turn of their device: no other group is made there meanwhile
    both      KEY ...                     the group's store, on the group's set-up thread
    both                                  one operation proves the pair; the turn ends after it if it makes the
                                          communicator, otherwise before it
    both      DONE

A turn ends after twice the connect timeout, or twice the creation time of the collective; a creation that is running
then has the same time again to end. A peer that stops during a set-up delays other set-ups of the device for that long,
not for the progress timeout. It delays no link that is set up.

The leader is the end with the smaller (instance, epoch, rank). It takes its own turn first, then sends TURN; if
the other end cannot take its own turn within a short time, it sends BUSY, and the leader releases its turn. So A -> B,
B -> C, C -> A never deadlock.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from devices.collectives import Collective, torch_version
from kvtransfer.hello import Hello
from kvtransfer.link_codec import WireError
from kvtransfer.process_group.devices import MAX_UNFREED, GroupDevice, Lease
from kvtransfer.process_group.exchange import SetupExchange, SetupKind
from kvtransfer.process_group.group import Group, in_one_line
from kvtransfer.process_group.issue import IssueQueue, result_within
from kvtransfer.process_group.link_ends import LinkGroup
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport_interface import Timeouts
from native.ticker import run_time
from wire.errors import Unavailable

if TYPE_CHECKING:
    from kvtransfer.process_group.payload import GroupStaging

SENDER, RECEIVER = 0, 1
_RANKS = 2
_SLICE_S = 0.2
_TURN = 2  # connect timeouts: one to agree on the turn, one to use it
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
    """Return this end's group once it is proven to reach the other end. Raises LinkLost, WireError, Unavailable.

    The group owns the lease afterwards; if this raises, the lease is released.
    """
    exchange, name = SetupExchange(stream, group_name(hello)), _group_name(hello)
    set_up = IssueQueue(f"kv-set-up-{name}")

    def give_up() -> None:
        lease.release()
        set_up.close()

    timeouts = replace(timeouts, connect_s=max(timeouts.connect_s, collective.make_s))
    try:
        leads = _is_leader(hello, rank)
        if rank == SENDER:
            lease.device.sends_to.add(group_name(hello))
        agree(exchange, collective, rank, timeouts)
        if rank == RECEIVER and group_name(hello) in lease.device.sends_to:  # its issuing thread would wait for itself
            raise Unavailable(f"both ends of the link are in this process, on {lease.device.name}")
        with _hold_turn(exchange, lease.device, leads, timeouts) as end:
            refuse_if_unfreed(lease.device.unfreed, lease.device.name)
            refuse_if_full(collective, lease.device.name)
            made = _make(exchange, stream, rank, collective, lease.device.name, set_up, timeouts, end)
            group = Group(
                made, collective, lease, name=name, peer=1 - rank, timeouts=timeouts, keep=staging, set_up=set_up
            )
            give_up = group.close
            del made  # the Group must have the only reference
            if collective.lazy:
                prove(group, staging, hello, rank, max(0.0, end - run_time()))
        if not collective.lazy:
            prove(group, staging, hello, rank, timeouts.progress_s)
        exchange.finish(timeouts.progress_s)
    except (RuntimeError, TimeoutError) as error:
        give_up()
        raise LinkLost(f"no {collective.name} group: {in_one_line(error)}") from error
    except BaseException:
        give_up()
        raise
    finally:
        lease.device.sends_to.discard(group_name(hello))
    return group


def _group_name(hello: Hello) -> str:
    return f"{hello.sender_id}-{hello.receiver_id}-{hello.link_epoch:x}"


def group_name(hello: Hello) -> str:
    """Return the group's unique name: a hash of the instances, their epochs, the link's epoch and its nonce."""
    identity = (
        f"{hello.sender_id}|{hello.sender_epoch}|{hello.sender_rank}|{hello.receiver_id}|{hello.receiver_epoch}|"
        f"{hello.receiver_rank}|{hello.link_epoch}|{hello.nonce.hex()}"
    )
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def agree(exchange: SetupExchange, collective: Collective, rank: int, timeouts: Timeouts) -> None:
    """Compare the kind of group that both ends make. Raises Unavailable with both values."""
    own_terms = f"{collective.name} of torch {torch_version()}"
    if rank == SENDER:
        exchange.send(SetupKind.TERMS, own_terms.encode())
        return
    peer_terms = exchange.receive([SetupKind.TERMS], timeouts.progress_s)[1].decode("utf-8", "replace")
    if peer_terms != own_terms:
        raise Unavailable(f"groups are made with {own_terms} here, but with {peer_terms[:200]} there")


def _is_leader(hello: Hello, rank: int) -> bool:
    sender = (hello.sender_id, hello.sender_epoch, hello.sender_rank)
    receiver = (hello.receiver_id, hello.receiver_epoch, hello.receiver_rank)
    if sender == receiver:
        raise Unavailable(f"{hello.sender_id} cannot make a group with itself")
    return (sender < receiver) == (rank == SENDER)


@contextmanager
def _hold_turn(exchange: SetupExchange, device: GroupDevice, leads: bool, timeouts: Timeouts) -> Iterator[float]:
    """Hold the device's turn; yield the time at which it must end."""
    take = _lead_setup if leads else _follow_setup
    end = take(exchange, device, timeouts, run_time() + timeouts.progress_s)
    try:
        yield end
    finally:
        device.making.release()


def _lead_setup(exchange: SetupExchange, device: GroupDevice, timeouts: Timeouts, deadline: float) -> float:
    while device.making.acquire(timeout=max(0.0, deadline - run_time())):
        end = run_time() + _TURN * timeouts.connect_s
        try:
            exchange.send(SetupKind.TURN)
            kind, _ = exchange.receive([SetupKind.GRANTED, SetupKind.BUSY], timeouts.connect_s + _SLICE_S)
        except BaseException:
            device.making.release()
            raise
        if kind is SetupKind.GRANTED:
            return end
        device.making.release()
        time.sleep(secrets.randbelow(_MAX_PAUSE_MS) / 1000)  # let the links that hold the other end's turn finish
    raise LinkLost(f"other groups were still being made on {device.name} after {timeouts.progress_s:g} s")


def _follow_setup(exchange: SetupExchange, device: GroupDevice, timeouts: Timeouts, deadline: float) -> float:
    while True:
        exchange.receive([SetupKind.TURN], max(0.0, deadline - run_time()))
        if device.making.acquire(timeout=_SLICE_S):
            break
        exchange.send(SetupKind.BUSY)
    end = run_time() + _TURN * timeouts.connect_s
    try:
        exchange.send(SetupKind.GRANTED)
    except BaseException:
        device.making.release()
        raise
    return end


def refuse_if_unfreed(unfreed: Collection[str], device: str) -> None:
    """Raise Unavailable, with both values, if too many closed groups could not be freed."""
    if len(unfreed) >= MAX_UNFREED:
        raise Unavailable(
            f"{len(unfreed)} groups of lost links still hold memory on {device}, and the limit is {MAX_UNFREED}"
        )


def refuse_if_full(collective: Collective, device: str) -> None:
    """Raise Unavailable, with both values, if a group does not fit into the device's memory."""
    needed, free = collective.link_bytes(os.environ), collective.free_bytes(device)
    if free is not None and free < needed:
        raise Unavailable(f"a link over {collective.name} needs {needed} bytes of {device}, which has {free} free")


def _make(
    exchange: SetupExchange,
    stream: Stream,
    rank: int,
    collective: Collective,
    device: str,
    set_up: IssueQueue,
    timeouts: Timeouts,
    end: float,
) -> Any:
    from kvtransfer.process_group.store import LinkStore

    host = stream.socket.getsockname()[0]

    def make() -> Any:
        exchange.deadline = min(end, run_time() + timeouts.connect_s)
        create = collective.make_link or collective.make
        return create(LinkStore(exchange), rank, _RANKS, host, timeouts.connect_s, device)

    made = set_up.submit(make)
    try:
        return result_within(made, end - run_time())
    except TimeoutError:
        if made.cancel():
            raise LinkLost(f"{device} did not issue the operation within its turn") from None
        return result_within(made, _TURN * timeouts.connect_s)  # running: one timeout for keys, one to connect


def prove(group: LinkGroup, staging: "GroupStaging", hello: Hello, rank: int, timeout_s: float) -> None:
    """Send the link's nonce through the group: this verifies the peer, and creates the communicator."""
    if rank == SENDER:
        staging.write(0, hello.nonce)
        result_within(group.send(staging.tensor(0, _PROOF_BYTES)), timeout_s)
        return
    result_within(group.receive(staging, _PROOF_BYTES), timeout_s)
    if staging.read(0, _PROOF_BYTES) != hello.nonce:
        raise WireError("the group and the link have different peers")
