"""Capture each graph on all ranks together: a graph contains their sums, so all have it or none does.

rank 0 --CAPTURE shape--> all: warm up, then capture --CAPTURED, or why not--> rank 0 --DROP shape--> all, if one failed

The sums of a warm-up are computed, so all ranks must join them: one that fails there is lost. Those of a capture are
only recorded, and wait for no other rank (NCCL_GRAPH_REGISTER in devices/collectives.py).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from engine.decode_graphs import DecodeGraphs, GraphShape, one_line
from engine.ranks.channel import RankMessageKind
from engine.ranks.packing import pack_shape
from engine.ranks.reduce import Reduce
from engine.ranks.sums import ReduceFailed
from engine.ranks.team import Team
from wire.errors import InstanceLost
from wire.kv_layout import Rank

CAPTURE_S = 300.0
"""Time limit for one shape on all ranks: libraries may compile kernels, and connect once more, at their first call."""

Guard = Callable[[float], AbstractContextManager[None]]
"""Makes the context in which rank 0 captures for at most so many seconds."""


class RankGraphs:
    """Implements ShapeOwner for the ranks of one instance, on rank 0. One thread calls it."""

    def __init__(self, own: DecodeGraphs, team: Team, reduce: Reduce, guard: Guard, num_ranks: int) -> None:
        """`own` are rank 0's."""
        self._own, self._team, self._reduce, self._guard, self._num_ranks = own, team, reduce, guard, num_ranks

    def capture(self, shape: GraphShape) -> None:
        """See ShapeOwner. Raises RuntimeError with the reason of the first rank that cannot, and InstanceLost."""
        self._team.send_all(RankMessageKind.CAPTURE, pack_shape(shape))
        errors = {0: self._capture_own(shape)} | {rank: self._result(rank) for rank in range(1, self._num_ranks)}
        failed = next(((rank, error) for rank, error in errors.items() if error), None)
        if failed is not None:
            self.drop(shape)
            raise RuntimeError(f"{Rank(failed[0], self._num_ranks)}: {failed[1]}")

    def drop(self, shape: GraphShape) -> None:
        """See ShapeOwner."""
        self._team.send_all(RankMessageKind.DROP, pack_shape(shape))
        self._own.drop(shape)

    def _capture_own(self, shape: GraphShape) -> str:
        try:
            with self._guard(CAPTURE_S):
                return capture_here(self._own, shape, self._reduce)
        except ReduceFailed as error:
            raise self._team.explain(str(error)) from error
        except InstanceLost:
            raise
        except Exception as error:
            raise self._team.explain_own(f"cannot capture a graph (--enforce-eager captures none): {error}") from error

    def _result(self, rank: int) -> str:
        return self._team.receive(rank, RankMessageKind.CAPTURED, CAPTURE_S).payload.decode(errors="replace")


def capture_here(graphs: DecodeGraphs, shape: GraphShape, reduce: Reduce) -> str:
    """Capture a shape on this rank, while the others do; return why it failed, empty if it did not.

    Raises the error of a failure within the warm-up: the other ranks wait for this one.
    """
    reduce.begin()
    try:
        graphs.capture(shape)
    except (ReduceFailed, InstanceLost):
        raise
    except Exception as error:  # from the network or a driver
        if reduce.num_sums < reduce.sums_per_pass:
            raise
        reduce.catch_up(2 * reduce.sums_per_pass)
        return one_line(error)
    return ""
