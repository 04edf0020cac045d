"""Launched steps of the arithmetic model that runs ahead: computed in order, once a result or a block is needed."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.step import BatchSequence, StepBatch, StepOutput

Compute = Callable[[StepBatch], StepOutput]


class LaunchQueue:
    """Owner of work that is launched and not done, like a device's stream. One thread calls it."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._last: LaunchedFake | None = None

    def launch(self, batch: StepBatch, compute: Compute) -> "LaunchedFake":
        """Queue `compute`, which makes the batch's output, for `run`."""
        launched = LaunchedFake(self, batch, compute, self._last if batch.carried else None)
        self._work.append(launched.compute)
        self._last = launched
        return launched

    def run(self, until: "LaunchedFake | None" = None) -> None:
        """Run the launched work in order: all of it, or up to and including `until`."""
        while self._work and (until is None or not until.is_done):
            self._work.popleft()()


class LaunchedFake:
    """Implements PendingStep. Copies the block tables, which grow after the launch."""

    def __init__(self, queue: LaunchQueue, batch: StepBatch, compute: Compute, before: "LaunchedFake | None") -> None:
        """`before` is the step that samples the tokens `batch.carried` refers to."""
        parts = [
            BatchSequence(one.start, one.count, tuple(one.block_ids), one.prompt_length) for one in batch.sequences
        ]
        self._queue, self._compute, self._before = queue, compute, before
        self._batch = replace(batch, sequences=tuple(parts))
        self._made: StepOutput | Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has been computed or has failed."""
        return self._made is not None

    @property
    def token_ids(self) -> Sequence[int]:
        """The sampled tokens; empty if the step failed."""
        return self._made.token_ids if isinstance(self._made, StepOutput) else ()

    def compute(self) -> None:
        """Compute the output; an error is raised by `collect`."""
        batch, before, self._before = self._batch, self._before, None
        try:
            self._made = self._compute(_filled(batch, before.token_ids if before is not None else ()))
        except Exception as error:  # noqa: BLE001 - raised where the step is collected
            self._made = error

    def collect(self) -> StepOutput:
        """Compute it and everything launched before it; return the output or raise its error."""
        self._queue.run(self)
        if isinstance(self._made, Exception):
            raise self._made
        assert self._made is not None, "run() computes every launched step up to this one"
        return self._made


def _filled(batch: StepBatch, before: Sequence[int]) -> StepBatch:
    """Return the batch with the tokens that the previous step has sampled."""
    if not batch.carried:
        return batch
    token_ids = list(batch.token_ids)
    for row, sample in batch.carried:
        token_ids[row] = before[sample]
    return replace(batch, token_ids=tuple(token_ids), carried=())
