"""Which rank of P sends which heads to which rank of D. Pure: both sides compute it, so no message is needed.

Every head that a D rank holds is sent by exactly one of the P ranks that hold it. If several do (more ranks than
heads), the D ranks that need the head are divided among them; a D rank assigned several uses them in turn, by layer.

    3 KV heads, TP 2 -> TP 4    P rank 0 (heads 0, 1) -> D rank 0 (head 0), rank 1 (head 0), rank 2 (head 1)
                                P rank 1 (head 2)     -> D rank 3 (head 2)
"""

from collections.abc import Mapping, Sequence

from kvtransfer.terms import RankHeads
from wire.errors import Incompatible
from wire.kv_layout import MAX_RANKS, Heads, KvTensor, Rank, head_range, ranks_holding
from wire.types import KvEndpoint

_NONE = Heads(0, 0)


def heads_between(tensor: KvTensor, sender: Rank, receiver: Rank) -> Heads:
    """Return the heads of `tensor` that this P rank sends to this D rank; an empty range for none."""
    held, wanted = head_range(tensor.heads, sender), head_range(tensor.heads, receiver)
    start, end = max(held.start, wanted.start), min(held.end, wanted.end)
    if start >= end or not _is_chosen(tensor, start, sender, receiver):
        return _NONE
    return Heads(start, end)


def part_between(tensors: Sequence[KvTensor], sender: Rank, receiver: Rank) -> RankHeads:
    """Return `heads_between` for each tensor."""
    return RankHeads(tensors, [heads_between(tensor, sender, receiver) for tensor in tensors])


def receivers_of(tensors: Sequence[KvTensor], sender: Rank, num_receivers: int) -> tuple[int, ...]:
    """Return the D ranks that this P rank sends to, ascending; none if other holders of its heads send them."""
    return tuple(
        d for d in range(num_receivers) if part_between(tensors, sender, Rank(d, num_receivers)).num_tensors
    )  # fmt: skip


def count_ranks(endpoints: Sequence[KvEndpoint]) -> int:
    """Return the number of listening ranks. Raises Incompatible, with value and limit, if there are too many."""
    last = max((endpoint.rank for endpoint in endpoints), default=0)
    if not 0 <= last < MAX_RANKS:
        raise Incompatible(f"an endpoint has KV rank {last}, but an instance has at most {MAX_RANKS} ranks")
    return last + 1


class Senders:
    """The parts that each P rank sends to one D rank, computed once for each number of P ranks."""

    def __init__(self, tensors: Sequence[KvTensor], receiver: Rank) -> None:
        self.tensors, self.receiver = tuple(tensors), receiver
        self._parts: dict[int, dict[int, RankHeads]] = {}

    def of(self, num_senders: int) -> Mapping[int, RankHeads]:
        """Return the parts by P rank, ascending, for the ranks that send anything (at least one)."""
        known = self._parts.get(num_senders)
        if known is None:
            parts = {p: part_between(self.tensors, Rank(p, num_senders), self.receiver) for p in range(num_senders)}
            known = self._parts[num_senders] = {p: part for p, part in parts.items() if part.num_tensors}
        return known


def _is_chosen(tensor: KvTensor, head: int, sender: Rank, receiver: Rank) -> bool:
    """Return whether, of the P ranks that hold `head`, this one sends it to this D rank.

    There are several only if heads are replicated on P, and then each of these P ranks holds this head alone.
    """
    holders, wanting = (ranks_holding(head, tensor.heads, side.of) for side in (sender, receiver))
    turn = receiver.number - wanting.start
    first, end = turn * len(holders) // len(wanting), (turn + 1) * len(holders) // len(wanting)
    return holders[first + tensor.layer % max(1, end - first)] == sender.number
