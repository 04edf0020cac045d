"""The Model of a tensor-parallel instance: rank 0's part, in lockstep with the processes of the other ranks.

launch: the step's inputs are sent to all ranks, rank 0 computes its part, and only rank 0 samples
layer L's KV is complete on all ranks after the sum that follows its attention: only then is it reported
on devices nothing here waits: sums and reports are enqueued, and `collect` waits for the step (stream_sum.py)
a step that reports no layer and fits a graph is replayed from it, on all ranks
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from devices.interface import Memory
from engine.interface import EngineInfo
from engine.ranks.graph_capture import RankGraphs
from engine.ranks.launch_watch import LaunchWatch
from engine.ranks.message_kinds import RankMessageKind
from engine.ranks.packing import pack_copies, pack_step
from engine.ranks.reduce import Reduce
from engine.ranks.stream_sum import StreamSum
from engine.ranks.sums import ReduceFailed
from engine.ranks.team import Team
from engine.ranks.written_layers import WrittenLayers
from engine.step import PendingStep, StepBatch, StepOutput
from engine.torch_model import TorchModel
from wire.errors import InstanceLost


class ShardedModel:
    """Implements Model. Owns rank 0's part, all pools and the team; one thread calls it."""

    def __init__(
        self, own: TorchModel, memories: Sequence[Memory], *, info: EngineInfo, team: Team, reduce: Reduce,
        cores: Sequence[int],
    ) -> None:  # fmt: skip
        """`memories` are all ranks', rank 0's first; `cores` are those of rank 0's device (empty: all)."""
        self._own, self._memories, self._info = own, tuple(memories), info
        self._team, self._reduce, self._cores = team, reduce, tuple(cores)
        self._watch = None if reduce.stream is None else LaunchWatch(reduce.stream, team.explain)
        self._placed = False

    @property
    def info(self) -> EngineInfo:
        """The info of the whole model, as if it had one rank."""
        return self._info

    @property
    def runs_ahead(self) -> bool:
        """Whether launches run ahead of the device: only if the sums stay on the device's stream."""
        return self._reduce.stream is not None and self._own.runs_ahead

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The pool of each rank."""
        return self._memories

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """The processes of the other ranks."""
        return self._team.pids

    def capture_graphs(self) -> None:
        """Capture the graphs of decode steps on all ranks. Called before the first step. Raises InstanceLost."""
        if self._own.graphs is not None:
            self._own.capture_graphs(
                RankGraphs(self._own.graphs, self._team, self._reduce, self._guard, len(self._memories))
            )

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        """Compute one step on all ranks. Raises InstanceLost, as does its `collect`, if a rank is gone or stuck."""
        self._place()
        is_replayed = layer_done is None and self._own.can_replay(batch)
        self._team.send_all(RankMessageKind.STEP, pack_step(batch, is_replayed=is_replayed))
        written = None if is_replayed else WrittenLayers(self._own.memory, layer_done)
        self._reduce.begin(None if written is None else written.after_sum)
        try:
            with self._guard():
                pending = self._own.launch(batch, written)
        except ReduceFailed as error:
            raise self._team.explain(str(error)) from error
        except InstanceLost:
            raise
        except Exception as error:
            if self._reduce.num_sums != self._reduce.sums_per_pass + bool(batch.carried):
                # the other ranks wait in the middle of this step
                raise self._team.explain_own(f"failed within a step: {error}") from error
            raise
        stream = self._reduce.stream
        return pending if stream is None else _StepOnStream(pending, stream, self._team)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block of every tensor on every rank."""
        self._team.send_all(RankMessageKind.COPY, pack_copies([source], [target]))
        with self._guard():
            self._own.copy_block(source, target)

    def save_blocks(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks to each rank's own swap area."""
        self._team.send_all(RankMessageKind.SAVE, pack_copies(block_ids, slots))
        with self._guard():
            self._own.save_blocks(block_ids, slots)

    def load_blocks(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots back on every rank."""
        self._team.send_all(RankMessageKind.LOAD, pack_copies(slots, block_ids))
        with self._guard():
            self._own.load_blocks(slots, block_ids)

    def close(self) -> None:
        """End the other ranks and free all pools. Idempotent."""
        self._team.close()
        self._own.close()  # before the sums: NCCL frees no communicator that graphs refer to
        self._reduce.close()
        for memory in self._memories[1:]:
            memory.close()

    def _guard(self, most_s: float | None = None) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.guard(most_s)

    def _place(self) -> None:
        """Keep the thread that steps, and the ones that torch starts from it, on the cores of rank 0's device."""
        if not self._placed and self._cores:
            os.sched_setaffinity(0, self._cores)  # this thread only
        self._placed = True


class _StepOnStream:
    """Implements PendingStep: a launched step, which is done on this rank once all its sums are."""

    def __init__(self, pending: PendingStep, stream: StreamSum, team: Team) -> None:
        self._pending, self._stream, self._team = pending, stream, team
        self._done = stream.mark()

    def collect(self) -> StepOutput:
        """Wait for the step and return its output. Raises InstanceLost if another rank is gone or stuck."""
        try:
            self._stream.wait(self._done)
        except ReduceFailed as error:
            raise self._team.explain(str(error)) from error
        except RuntimeError as error:
            raise self._team.explain_own(f"failed within a step: {error}") from error
        return self._pending.collect()
