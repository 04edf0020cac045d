"""The settings of one rank's sender and receiver, the same in rank 0's process and in the rank's own."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.interface import PoolMemory, SenderEvents
from kvtransfer.quorum import TicketLedger
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from native.ticker import run_time
from security.trust import Trust


@dataclass(frozen=True, slots=True)
class RankTransferSettings:
    """Settings with which a rank sends and receives its part: those of its instance, links and trusted peers.

    `step_s` is the instance's --rank-timeout. `secret` is the cluster secret's bytes in hex digits. `addresses` and
    `loopback` are those of security/trust.Trust.
    """

    instance_id: str
    epoch: int
    host: str
    source: str | None
    transports: tuple[str, ...]
    lease_s: float
    port_range: tuple[int, int] | None
    digests: bool
    links_per_peer: int
    step_s: float
    secret: str | None = dataclasses.field(repr=False, default=None)
    addresses: tuple[str, ...] = ()
    loopback: bool = True

    def receiver(self, memory: PoolMemory, quorum: TicketLedger, trust: Trust) -> KvReceiver:
        """Open a receiver over a rank's pool."""
        return KvReceiver(
            memory, instance_id=self.instance_id, epoch=self.epoch, host=self.host, transports=self.transports,
            quorum=quorum, clock=run_time, lease_s=self.lease_s, port_range=self.port_range, digests=self.digests,
            trust=trust, step_timeout_s=self.step_s,
        )  # fmt: skip

    def sender(
        self, memory: PoolMemory, events: SenderEvents, trust: Trust, progress_age: Callable[[], float],
        catch_up: Callable[[], bool] | None = None,
    ) -> KvSender:  # fmt: skip
        """Open a sender over a rank's pool; `progress_age` and `catch_up` are KvSender's."""
        return KvSender(
            memory, instance_id=self.instance_id, epoch=self.epoch, transports=self.transports, events=events,
            clock=run_time, progress_age=progress_age, links_per_peer=self.links_per_peer, digests=self.digests,
            trust=trust, source=self.source, catch_up=catch_up, step_timeout_s=self.step_s,
        )  # fmt: skip
