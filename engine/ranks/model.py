"""The Model of a tensor-parallel instance: rank 0's part, in lockstep with the processes of the other ranks.

launch: the step's inputs are sent to all ranks, rank 0 computes its part, and only rank 0 samples
layer L's KV is complete on all ranks after the sum that follows its attention: only then is it reported
"""

import os
from collections.abc import Callable, Sequence

from devices.interface import Memory
from engine.interface import EngineInfo
from engine.ranks.channel import RankMessageKind
from engine.ranks.packing import pack_copies, pack_step
from engine.ranks.reduce import Reduce
from engine.ranks.sums import ReduceFailed
from engine.ranks.team import Team
from engine.step import PendingStep, StepBatch
from engine.torch_model import TorchModel
from wire.errors import PdserveError


class ShardedModel:
    """Implements Model. Owns rank 0's part, all pools and the team; one thread calls it."""

    def __init__(
        self, own: TorchModel, memories: Sequence[Memory], *, info: EngineInfo, team: Team, reduce: Reduce,
        num_sums: int, cores: Sequence[int],
    ) -> None:  # fmt: skip
        """`memories` are all ranks', rank 0's first; `cores` are those of rank 0's device (empty: all)."""
        self._own, self._memories, self._info = own, tuple(memories), info
        self._team, self._reduce, self._num_sums, self._cores = team, reduce, num_sums, tuple(cores)
        self._placed = False

    @property
    def info(self) -> EngineInfo:
        """The info of the whole model, as if it had one rank."""
        return self._info

    @property
    def runs_ahead(self) -> bool:
        """Whether launches run ahead of the device: no, a step is computed when its launch returns."""
        return False

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The pool of each rank."""
        return self._memories

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """The processes of the other ranks."""
        return self._team.pids

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        """Compute one step on all ranks. Raises InstanceLost when one of them is gone or stuck."""
        self._place()
        self._team.send_all(RankMessageKind.STEP, pack_step(batch))
        written = _Written(layer_done)
        self._reduce.begin(written.after_sum)
        try:
            return self._own.launch(batch, written)
        except ReduceFailed as error:
            raise self._team.explain(str(error)) from error
        except PdserveError:
            raise
        except Exception as error:
            if self._reduce.num_sums != self._num_sums:  # the other ranks wait in the middle of this step
                raise self._team.explain_own(f"failed within a step: {error}") from error
            raise

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block of every tensor on every rank."""
        self._team.send_all(RankMessageKind.COPY, pack_copies([source], [target]))
        self._own.copy_block(source, target)

    def save_blocks(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks to each rank's own swap area."""
        self._team.send_all(RankMessageKind.SAVE, pack_copies(block_ids, slots))
        self._own.save_blocks(block_ids, slots)

    def load_blocks(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots back on every rank."""
        self._team.send_all(RankMessageKind.LOAD, pack_copies(slots, block_ids))
        self._own.load_blocks(slots, block_ids)

    def close(self) -> None:
        """End the other ranks and free all pools. Idempotent."""
        self._team.close()
        self._reduce.close()
        self._own.close()
        for memory in self._memories[1:]:
            memory.close()

    def _place(self) -> None:
        """Keep the thread that steps, and the ones that torch starts from it, on the cores of rank 0's device."""
        if not self._placed and self._cores:
            os.sched_setaffinity(0, self._cores)  # this thread only
        self._placed = True


class _Written:
    """Delays the report that a layer's KV is written until all ranks have written theirs."""

    def __init__(self, layer_done: Callable[[int], None] | None) -> None:
        self._layer_done = layer_done
        self._layer: int | None = None

    def __call__(self, layer: int) -> None:
        self._layer = layer

    def after_sum(self) -> None:
        """Report the layer; called after each sum over the ranks."""
        layer, self._layer = self._layer, None
        if layer is not None and self._layer_done is not None:
            self._layer_done(layer)
