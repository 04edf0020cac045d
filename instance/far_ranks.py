"""The hand-off of ranks whose pools are on devices of their own: each opens its links in its own process."""

import contextlib
import socket
from collections.abc import Mapping, Sequence

from devices.interface import Memory
from engine.ranks.rank_pool import RankPool
from instance.config import InstanceConfig
from instance.host import Identity
from instance.kv_address import kv_host, kv_source
from kvtransfer.far_rank import FarRank
from kvtransfer.rank_settings import RankTransferSettings
from processes.rank_payloads import to_json
from security.trust import Trust
from wire.kv_layout import Rank

_CONNECT_S = 60.0


def connect_ranks(
    memories: Sequence[Memory], settings: RankTransferSettings, trust: Trust
) -> Mapping[Rank, FarRank]:  # fmt: skip
    """Start the KV links of each rank that has its own pool; return rank 0's connection to each of these ranks.

    The first step may begin only after this returns.

    Raises ConfigError, and InstanceLost if a rank has exited or does not answer.
    """
    pools = [memory for memory in memories if isinstance(memory, RankPool)]
    with contextlib.ExitStack() as undo:
        far_by_rank: dict[Rank, FarRank] = {}
        for pool in pools:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            far = FarRank(
                ours, pool.layout.rank, pool.explain, trust,
                num_marks=lambda: getattr(memories[0], "num_marks", 0),
            )  # fmt: skip
            undo.callback(far.close)
            with theirs:
                pool.hand_over(to_json(settings), theirs.fileno())
            far_by_rank[pool.layout.rank] = far
        for far in far_by_rank.values():
            far.start(_CONNECT_S)
        undo.pop_all()
    return far_by_rank


def transfer_settings(config: InstanceConfig, identity: Identity) -> RankTransferSettings:
    """Return the settings of every rank's sender and receiver."""
    options, trust = config.options, config.trust
    return RankTransferSettings(
        instance_id=identity.instance_id, epoch=identity.epoch, host=kv_host(config), source=kv_source(config),
        transports=options.kv_transport, lease_s=config.ticket_lease_s, port_range=config.port_range(),
        digests=options.kv_digests, links_per_peer=options.kv_links, step_s=options.rank_timeout,
        secret=None if trust.secret is None else trust.secret.value.hex(),
        addresses=tuple(sorted(trust.addresses)), loopback=trust.loopback,
    )  # fmt: skip
