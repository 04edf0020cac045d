"""The engine thread: run the posted work between steps, then one step, forever; each turn marks progress.

mark ----- layer ----- layer ----- step done ----- idle turn        each sets the mark
     turn        turn        turn            (no turn)              `slowest_turn_s`: the longest recent turn, or
                                                                    the estimate for the current chunk if longer
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from engine.interface import Chunk, Engine, OnLayer, StepResult
from telemetry.histogram import BucketHistogram
from telemetry.logs import EventLogger
from wire.load import STEP_TOKEN_BUCKETS, LoadSnapshot
from wire.shared_limits import progress_limit

_log = EventLogger("engine")

IDLE_TURN_S = 0.5
_KEPT_A_STEP = 0.999


class EngineLoop:
    """Owner of the one thread that may call the engine.

    `clock` counts the seconds in which the process could run; `chunk_tokens` is the largest chunk of a step.
    """

    def __init__(
        self, engine: Engine, *, clock: Callable[[], float], on_layer: OnLayer, on_step: Callable[[StepResult], None],
        chunk_tokens: int = 1,
    ) -> None:  # fmt: skip
        self._engine, self._clock, self._chunk_tokens = engine, clock, chunk_tokens
        self._on_layer, self._on_step = on_layer, on_step
        self._inbox: deque[Callable[[Engine], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._mark = clock()
        self._longest_turn_s = self._turns_s = 0.0
        self._num_turns = self._num_in_hand = 0
        self._slowest_turn_s = self._token_turn_s = 0.0
        self.steps = 0
        self.step_seconds = 0.0
        self.step_tokens = BucketHistogram(STEP_TOKEN_BUCKETS)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._mark = self._clock()
        self._thread.start()

    def post(self, work: Callable[[Engine], None]) -> None:
        """Run `work` on the engine thread, between steps, in the order posted. Any thread; never waits."""
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def progress_age(self) -> float:
        """Return the seconds since the loop last completed a turn or a layer."""
        return max(0.0, self._clock() - self._mark)

    @property
    def slowest_turn_s(self) -> float:
        """The longest recent turn, or the estimate for the prompt tokens being computed if that is longer.

        The estimate scales the last step's mean turn in proportion to the tokens: an upper bound.
        """
        return max(self._slowest_turn_s, self._num_in_hand * self._token_turn_s)

    def is_stuck(self, least_s: float) -> bool:
        """Return whether there was no progress within the limit, which is at least `least_s`."""
        return self.progress_age() > progress_limit(self.slowest_turn_s, least_s=least_s)

    def add_to(self, load: LoadSnapshot) -> None:
        """Add the loop's figures to `load`. Any thread."""
        load.progress_age_s = self.progress_age()
        load.slowest_turn_s = self.slowest_turn_s
        load.steps = self.steps
        load.step_seconds = self.step_seconds
        load.tokens_computed = int(self.step_tokens.sum)
        load.step_tokens = self.step_tokens.counts

    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Request the thread to end after its step; return whether it did in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            self._run_inbox()
            try:
                self._run_turn()
            except Exception as error:  # noqa: BLE001 - the thread's outermost frame: one error must not end the loop
                _log.error("engine_turn_failed", error, error=error)
                self._wait_for_work()  # an error that lasts must not make the loop spin; health checks see the old mark
            else:
                self._mark = self._clock()

    def _run_turn(self) -> None:
        self._num_in_hand = min(self._chunk_tokens, self._engine.load().uncomputed_tokens)
        if not self._engine.has_work():
            self._wait_for_work()
            return
        self._mark = self._clock()
        self._longest_turn_s = self._turns_s = 0.0
        self._num_turns = 0
        result = self._engine.step(self._layer_done)
        self._record_turn()
        self._measure_turns(result.num_tokens)
        self.steps += 1
        self.step_seconds += result.seconds
        if result.num_served:
            self.step_tokens.observe(result.num_served)
        self._on_step(result)

    def _record_turn(self) -> None:
        now = self._clock()
        self._longest_turn_s = max(self._longest_turn_s, now - self._mark)
        self._turns_s += now - self._mark
        self._num_turns += 1
        self._mark = now

    def _measure_turns(self, num_tokens: int) -> None:
        if num_tokens:
            self._token_turn_s = self._turns_s / self._num_turns / num_tokens
            self._slowest_turn_s = max(self._longest_turn_s, _KEPT_A_STEP * self._slowest_turn_s)

    def _run_inbox(self) -> None:
        while self._inbox:
            work = self._inbox.popleft()
            try:
                work(self._engine)
            except Exception as error:  # noqa: BLE001 - one request's work must not end the loop
                _log.error("posted_work_failed", error, error=error)

    def _layer_done(self, layer: int, chunks: Sequence[Chunk]) -> None:
        self._record_turn()
        self._on_layer(layer, chunks)

    def _wait_for_work(self) -> None:
        with self._wake:
            if not self._inbox and not self._stopping:
                self._wake.wait(IDLE_TURN_S)
