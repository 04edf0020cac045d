"""Capture each graph on all ranks together: a graph contains their sums, so all have it or none does.

rank 0 --CAPTURE shape--> all: run the network without sums --CAPTURED, or why not--> rank 0
rank 0 --CAPTURE shape--> all: warm up, then capture        --CAPTURED, or why not--> rank 0
       --DROP shape-----> all, as soon as one has failed

The first round needs no other rank, so a rank without memory for a shape is found before any rank waits for sums.
The sums of a warm-up are computed, so all ranks must join them: one that fails there is lost. Those of a capture are
only recorded, and wait for no other rank (NCCL_GRAPH_REGISTER in devices/collectives.py).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from engine.decode_graphs import DecodeGraphs, GraphShape, one_line
from engine.ranks.message_kinds import RankMessageKind
from engine.ranks.packing import pack_shape
from engine.ranks.reduce import Reduce
from engine.ranks.sums import ReduceFailed
from engine.ranks.team import Team
from wire.errors import PdserveError
from wire.kv_layout import Rank

CAPTURE_S = 300.0
"""Time limit for one shape on all ranks: libraries may compile kernels and open connections at their first call."""

Guard = Callable[[float], AbstractContextManager[None]]
"""Makes the context in which rank 0 captures for at most so many seconds."""


Agree = Callable[[], bool]
"""Waits until every rank has run the network without sums, and returns whether all could."""


class CaptureFailed(RuntimeError):
    """A rank cannot capture a shape, and no other rank is waiting for it."""


class RankGraphs:
    """Implements ShapeOwner for the ranks of one instance, on rank 0. One thread calls it."""

    def __init__(self, own: DecodeGraphs, team: Team, reduce: Reduce, guard: Guard, num_ranks: int) -> None:
        """`own` are rank 0's graphs."""
        self._own, self._team, self._reduce, self._guard, self._num_ranks = own, team, reduce, guard, num_ranks

    def capture(self, shape: GraphShape) -> None:
        """See ShapeOwner. Raises CaptureFailed with the reason of the first rank that cannot, and InstanceLost."""
        self._team.send_all(RankMessageKind.CAPTURE, pack_shape(shape))
        try:
            own = self._capture_own(shape)
            self._check_all(own)
        except CaptureFailed:
            self.drop(shape)
            raise

    def drop(self, shape: GraphShape) -> None:
        """See ShapeOwner."""
        self._team.send_all(RankMessageKind.DROP, pack_shape(shape))
        self._own.drop(shape)

    def _capture_own(self, shape: GraphShape) -> str:
        try:
            with self._guard(CAPTURE_S):
                return capture_here(self._own, shape, self._reduce, lambda: self._agree(shape))
        except ReduceFailed as error:
            raise self._team.explain(str(error)) from error
        except (PdserveError, CaptureFailed):
            raise
        except Exception as error:
            raise self._team.explain_own(f"cannot capture a graph (--enforce-eager captures none): {error}") from error

    def _agree(self, shape: GraphShape) -> bool:
        """Have all ranks continue, after all have run the network without sums. Raises CaptureFailed with a reason."""
        self._check_all("")
        self._team.send_all(RankMessageKind.CAPTURE, pack_shape(shape))
        return True

    def _check_all(self, own: str) -> None:
        """Receive the other ranks' results; `own` is rank 0's. Raises CaptureFailed if one has failed."""
        results = [own, *(self._result_of(rank) for rank in range(1, self._num_ranks))]
        for number, error in enumerate(results):
            if error:
                raise CaptureFailed(f"{Rank(number, self._num_ranks)}: {error}")

    def _result_of(self, rank: int) -> str:
        return self._team.receive(rank, RankMessageKind.CAPTURED, CAPTURE_S).payload.decode(errors="replace")


def capture_here(graphs: DecodeGraphs, shape: GraphShape, reduce: Reduce, agree: Agree) -> str:
    """Capture a shape on this rank, while the others do; return why it failed, empty if it did not.

    Raises the error of a failure within the warm-up, where the other ranks wait for this one, and CaptureFailed if
    another rank cannot capture the shape.
    """
    reduce.begin()
    is_alone = True

    def agree_here() -> None:
        nonlocal is_alone
        is_alone = False
        if not agree():
            raise CaptureFailed("another rank cannot capture this shape")

    try:
        graphs.capture(shape, agree_here)
    except (ReduceFailed, PdserveError, CaptureFailed):
        raise
    except Exception as error:  # from the network or a driver
        if is_alone:
            return one_line(error)
        if reduce.num_sums < reduce.sums_per_pass:
            raise
        reduce.catch_up(2 * reduce.sums_per_pass)
        return one_line(error)
    return ""
