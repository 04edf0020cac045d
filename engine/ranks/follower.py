"""A rank other than 0: it computes its part of each step on its own pool, without sampling."""

import contextlib
import os
from collections import deque
from collections.abc import Callable

from devices.host_pool import HostPool
from devices.interface import Event, Memory
from engine.decode_graphs import num_spare_blocks
from engine.device_modules import give_back
from engine.ranks.budget import with_budget
from engine.ranks.graph_capture import Agree, CaptureFailed, capture_here
from engine.ranks.marks import Marks
from engine.ranks.message_kinds import RankMessageKind
from engine.ranks.packing import unpack_copies, unpack_shape, unpack_step
from engine.ranks.rank_part import RankPart, load_part, part_info
from engine.ranks.reduce import Reduce
from engine.ranks.setup import PoolSetup, RankSetup
from engine.ranks.written_layers import WrittenLayers
from engine.step import StepBatch
from engine.torch_model import TorchModel
from native.ticker import run_time
from processes.rank_payloads import from_json
from wire.kv_layout import PoolLayout

_POLL_S = 0.001


class Follower:
    """Owns one rank's part, pool and group; one thread calls it."""

    def __init__(self, setup: RankSetup, clock: Callable[[], float] = run_time) -> None:
        """Load this rank's part. Raises ConfigError."""
        self._reduce = Reduce()
        self.part: RankPart = with_budget(load_part(setup, self._reduce))
        self._model: TorchModel | None = None
        self._pool: Memory | None = None
        self._clock = clock
        self._progress_at: float | None = None  # when the running step last finished a layer
        self._launched: deque[Event] = deque()  # after each step that the device has not completed

    @property
    def pool(self) -> Memory:
        """This rank's pool, after `take_pool`."""
        assert self._pool is not None
        return self._pool

    def take_pool(self, payload: bytes, fds: tuple[int, ...]) -> None:
        """Map the pool that rank 0 made, or make one on this rank's device. Raises ConfigError."""
        whole = from_json(PoolSetup, payload)
        self.part.check_held(whole.tensors)
        setup, device = self.part.setup, self.part.device
        spare = num_spare_blocks(whole.graph_rows, setup.block_size)
        layout, with_spare = (
            PoolLayout(whole.tensors, num_blocks=blocks, block_size=setup.block_size, rank=setup.rank)
            for blocks in (whole.num_blocks, whole.num_blocks + spare)
        )
        self._pool = HostPool.join(layout, fds[0]) if fds else device.make_pool(with_spare)
        self._model = self.part.make_model(part_info(self.part, layout), self._pool, whole.graph_rows)

    def connect(self, way: str, store_fd: int, marks_fd: int) -> None:
        """Connect to the other ranks. Raises ReduceFailed."""
        self.part.connect(way, store_fd, Marks(marks_fd, self.part.setup.of))
        os.close(marks_fd)

    def capture(self, payload: bytes, agree: Agree) -> bytes | None:
        """Capture a graph with the other ranks; return why this rank cannot, empty if it can. Raises ReduceFailed.

        Returns None if it is another rank that cannot: that rank returns why.
        """
        assert self._model is not None
        assert self._model.graphs is not None
        failure: str | None = None
        with contextlib.suppress(CaptureFailed):
            failure = capture_here(self._model.graphs, unpack_shape(payload), self._reduce, agree)
        give_back(self.part.device)
        return None if failure is None else failure.encode()

    def drop(self, payload: bytes) -> None:
        """Forget a graph, as the other ranks do."""
        assert self._model is not None
        assert self._model.graphs is not None
        self._model.graphs.drop(unpack_shape(payload))

    def step(self, payload: bytes) -> None:
        """Compute this rank's part of a step; on a device, launch it and mark each layer. Raises ReduceFailed."""
        assert self._model is not None
        self._progress_at = self._clock()
        batch, is_replayed = unpack_step(payload)
        if is_replayed or self.part.device.traits.pools_on_host:
            self._reduce.begin()
            self._model.logits(batch)
        else:
            self._step_on_device(batch)
        stream = self._reduce.stream
        if stream is not None:
            self._launched.append(stream.mark())
        else:
            self._progress_at = None

    def finish(self, has_message: Callable[[float], bool]) -> None:
        """Wait until the launched steps are done, or for a message. Raises the device's error.

        `has_message(timeout_s)` waits for one.
        """
        while self._launched:
            if self._launched[0].is_done:
                self._launched.popleft()
                self._progress_at = self._clock() if self._launched else None
            elif has_message(_POLL_S):
                return

    def step_age(self) -> float:
        """Return the seconds since the running step began its current layer, 0 between steps. Any thread.

        Time in which this process could not run does not count."""
        came_on = self._progress_at
        return 0.0 if came_on is None else self._clock() - came_on

    def copy(self, kind: RankMessageKind, payload: bytes) -> None:
        """Copy blocks within the pool, to the swap area, or back."""
        assert self._model is not None
        sources, targets = unpack_copies(payload)
        if kind == RankMessageKind.SAVE:
            self._model.save_blocks(sources, targets)
        elif kind == RankMessageKind.LOAD:
            self._model.load_blocks(sources, targets)
        else:
            for source, target in zip(sources, targets, strict=True):
                self._model.copy_block(source, target)

    def _step_on_device(self, batch: StepBatch) -> None:
        """Launch a step; only rank 0 reports layers, once they are written on all ranks (written_layers.py)."""
        assert self._model is not None
        written = WrittenLayers(self._pool)

        def layer_done(layer: int) -> None:
            self._progress_at = self._clock()
            written(layer)

        self._reduce.begin(written.after_sum)
        self._model.logits(batch, layer_done)
