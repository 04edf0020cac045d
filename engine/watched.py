"""A model on a device that may be lost: after a failed or late step the device is tested, and a loss is reported once.

step fails or is late --> tiny op on the device --done--> the step's own error, or it continues
                            |
                            +--fails or is late--> InstanceLost, raised here and reported; the device is not used again

An instance that kept running without its device would answer every prompt with an error at once, and so look idle to
placement. Models with pools on the host (CPUs) are not watched: a CPU is not lost alone.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from devices.interface import Device, Memory
from devices.liveness import LivenessCheck, check_periodically, in_a_line
from engine.interface import EngineInfo
from engine.step import Model, PendingStep, StepBatch, StepOutput
from engine.step_limit import queued_s
from native.ticker import run_time
from telemetry.logs import EventLogger
from wire.errors import InstanceLost, PdserveError

_log = EventLogger("engine")
_NUM_CHECKS = 4
"""How often the device's work is checked within the time limit of a tiny op."""

OnLost = Callable[[PdserveError], None]
"""Called once when the device is lost: the instance must exit."""

Guard = Callable[[], AbstractContextManager[object]]
"""Makes the context in which work on a device runs."""


class DeviceWatch:
    """Detects the loss of a device. One thread uses the device, and another checks it meanwhile.

    The checking thread is owned by the watch, and ends soon after the watch is deleted.
    """

    def __init__(
        self, device: Device, on_lost: OnLost, touch_s: float, clock: Callable[[], float] = run_time
    ) -> None:  # fmt: skip
        """Allocates a few bytes on the device. `touch_s` is the time limit of a tiny op after all queued work."""
        self._touch, self._on_lost, self._touch_s, self._clock = LivenessCheck(device), on_lost, touch_s, clock
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._since: float | None = None  # when the device's current work started; None if it has none
        check_periodically(self, touch_s / _NUM_CHECKS, "device-watch")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run work on the device. Raises InstanceLost if the device is lost, before or during it."""
        if self._lost is not None:
            raise InstanceLost(self._lost)
        self._since = self._clock()
        try:
            yield
        except Exception as error:
            lost = self._test_device(error)
            if lost is not None:
                raise lost from error
            raise
        finally:
            self._since = None

    def check(self) -> bool:
        """Test the device if its work takes too long; return False if it is known to be lost."""
        since = self._since
        if since is not None and self._clock() - since > self._touch_s:
            self._test_device(TimeoutError(f"its work has not ended within {self._touch_s:g} s"))
        return self._lost is None

    def _test_device(self, error: Exception) -> InstanceLost | None:
        with self._lock:
            if self._lost is not None:
                return InstanceLost(self._lost)
            why = self._touch.why_not(self._touch_s)
            if why is None:
                return None
            self._lost = f"{why} (after {in_a_line(error)}); without it this instance cannot continue"
            lost = InstanceLost(self._lost)
        _log.error("device_lost", error, reason=why)
        self._on_lost(lost)
        return lost


class WatchedModel:
    """Implements Model by delegating to another one, with all work on the device guarded."""

    def __init__(self, model: Model, watch: DeviceWatch) -> None:
        self._model, self._watch = model, watch

    @property
    def info(self) -> EngineInfo:
        """See Model."""
        return self._model.info

    @property
    def runs_ahead(self) -> bool:
        """See Model."""
        return self._model.runs_ahead

    @property
    def memories(self) -> Sequence[Memory]:
        """See Model."""
        return self._model.memories

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        """See Model."""
        with self._watch.guard():
            return _WatchedStep(self._model.launch(batch, layer_done), self._watch)

    def copy_block(self, source: int, target: int) -> None:
        """See Model."""
        with self._watch.guard():
            self._model.copy_block(source, target)

    def save_blocks(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """See Model."""
        with self._watch.guard():
            self._model.save_blocks(block_ids, slots)

    def load_blocks(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """See Model."""
        with self._watch.guard():
            self._model.load_blocks(slots, block_ids)

    def close(self) -> None:
        """See Model; unguarded: memory on a lost device is freed when the process exits."""
        self._model.close()


class _WatchedStep:
    """Implements PendingStep."""

    def __init__(self, pending: PendingStep, watch: DeviceWatch) -> None:
        self._pending, self._watch = pending, watch

    def collect(self) -> StepOutput:
        """See PendingStep."""
        with self._watch.guard():
            return self._pending.collect()


def guard_of(device: Device, on_lost: OnLost, step_s: float) -> Guard:
    """Return the guard for work on this device; it does nothing for a device that cannot be lost alone.

    `step_s` is the time limit of a step: the device counts as lost only after that time for each queued step.
    """
    return nullcontext if device.traits.pools_on_host else DeviceWatch(device, on_lost, queued_s(step_s)).guard


def watched(model: Model, device: Device, on_lost: OnLost, step_s: float) -> Model:
    """Return the model, watched if its device can be lost alone; `step_s` as in guard_of."""
    return model if device.traits.pools_on_host else WatchedModel(model, DeviceWatch(device, on_lost, queued_s(step_s)))
