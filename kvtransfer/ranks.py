"""Which rank of P sends which heads to which rank of D. Pure: both sides compute it, so nobody has to say it.

Every head that a D rank holds comes from exactly one of the P ranks that hold it. Where several do (more ranks than
heads), the D ranks that want the head share them out; a D rank left with several takes them in turn, layer by layer.

    9/3 heads, TP 2 -> TP 4     P rank 0 (heads 0 1)  -> D rank 0 (0), rank 1 (0), rank 2 (1)
                                P rank 1 (head 2)     -> D rank 3 (2)
"""

from collections.abc import Mapping, Sequence

from wire.kv_layout import Heads, KvTensor, Rank, head_range, ranks_holding

_NONE = Heads(0, 0)


def heads_between(tensor: KvTensor, sender: Rank, receiver: Rank) -> Heads:
    """Return the heads of `tensor` that this P rank sends to this D rank; an empty range for none."""
    held, wanted = head_range(tensor.heads, sender), head_range(tensor.heads, receiver)
    start, end = max(held.start, wanted.start), min(held.end, wanted.end)
    if start >= end or not _is_chosen(tensor, start, sender, receiver):
        return _NONE
    return Heads(start, end)


def all_heads_between(tensors: Sequence[KvTensor], sender: Rank, receiver: Rank) -> tuple[Heads, ...]:
    """Return `heads_between` for each tensor."""
    return tuple(heads_between(tensor, sender, receiver) for tensor in tensors)


def receivers_of(tensors: Sequence[KvTensor], sender: Rank, num_receivers: int) -> tuple[int, ...]:
    """Return the D ranks that this P rank sends anything to, ascending; none where other holders of its head do."""
    return tuple(
        d for d in range(num_receivers) if any(map(_count, all_heads_between(tensors, sender, Rank(d, num_receivers))))
    )


class Senders:
    """Who sends what to one D rank, worked out once for each number of P ranks."""

    def __init__(self, tensors: Sequence[KvTensor], receiver: Rank) -> None:
        self.tensors, self.receiver = tuple(tensors), receiver
        self._heads_by_rank: dict[int, dict[int, tuple[Heads, ...]]] = {}

    def of(self, num_senders: int) -> Mapping[int, tuple[Heads, ...]]:
        """Return the heads of each tensor by P rank, ascending, of those that send anything: at least one."""
        known = self._heads_by_rank.get(num_senders)
        if known is None:
            ranges = {
                p: all_heads_between(self.tensors, Rank(p, num_senders), self.receiver) for p in range(num_senders)
            }
            known = self._heads_by_rank[num_senders] = {p: sent for p, sent in ranges.items() if any(map(_count, sent))}
        return known


def _count(heads: Heads) -> int:
    return heads.end - heads.start


def _is_chosen(tensor: KvTensor, head: int, sender: Rank, receiver: Rank) -> bool:
    """Whether, of the P ranks that hold `head`, this one sends it to this D rank.

    Only where heads repeat on P are there several, and then a P rank holds this head alone.
    """
    holders, wanting = (ranks_holding(head, tensor.heads, side.of) for side in (sender, receiver))
    turn = receiver.number - wanting.start
    first, end = turn * len(holders) // len(wanting), (turn + 1) * len(holders) // len(wanting)
    return holders[first + tensor.layer % max(1, end - first)] == sender.number
