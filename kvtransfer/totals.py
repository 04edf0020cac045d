"""Merges the figures of several links or ranks into those of one instance. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from kvtransfer.interface import SendStats
from kvtransfer.receiver_counts import ReceiverCounts
from wire.link_reasons import is_slower
from wire.load import LinkStatus

PeerProcess = tuple[str, int]
"""A peer's id and its process's epoch."""


def merge_stats(parts: Sequence[SendStats]) -> SendStats:
    """Return the parts of one ticket as one: the sum of the bytes, the longest time, every transport."""
    if len(parts) == 1:
        return parts[0]
    return SendStats(
        transport=_names(part.transport for part in parts),
        kv_bytes=sum(part.kv_bytes for part in parts),
        seconds=max(part.seconds for part in parts),
        resent_frames=sum(part.resent_frames for part in parts),
        early_bytes=sum(part.early_bytes for part in parts),
    )


def merge_links(parts: Iterable[tuple[PeerProcess, LinkStatus]]) -> tuple[LinkStatus, ...]:
    """Return one status per process of a peer: sums of bytes and losses, the worst state, the slowest measurement."""
    by_process: dict[PeerProcess, LinkStatus] = {}
    for process, part in parts:
        known = by_process.get(process)
        by_process[process] = part if known is None else _merge_two(known, part)
    return tuple(by_process.values())


def add_counts(parts: Sequence[ReceiverCounts]) -> ReceiverCounts:
    """Return the sum of all counts."""
    return ReceiverCounts(*(sum(getattr(part, one.name) for part in parts) for one in fields(ReceiverCounts)))


def _merge_two(one: LinkStatus, other: LinkStatus) -> LinkStatus:
    reasons = (*one.passed_over, *other.passed_over)
    measured = [status for status in (one, other) if status.bytes_per_s > 0]
    return replace(
        one,
        transport=_names((one.transport, other.transport)),
        state=other.state if one.state == "up" else one.state,
        epoch=max(one.epoch, other.epoch),
        bytes_sent=one.bytes_sent + other.bytes_sent,
        failures=one.failures + other.failures,
        fallbacks=one.fallbacks + other.fallbacks,
        round_trip_s=max((status.round_trip_s for status in measured), default=0.0),
        bytes_per_s=min((status.bytes_per_s for status in measured), default=0.0),
        passed_over=tuple({_transport_if_slower(text): text for text in reasons}.values()),
    )


def _transport_if_slower(text: str) -> str:
    """Return only the transport of a reason with rates, which differ between ranks; any other text unchanged."""
    transport, _, reason = text.partition(": ")
    return transport if is_slower(reason) else text


def _names(transports: Iterable[str]) -> str:
    """Join the distinct names."""
    return "+".join(dict.fromkeys(name for text in transports for name in text.split("+") if name))
