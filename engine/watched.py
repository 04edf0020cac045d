"""A model on a device that may die: after a step that failed the device is tried, and its loss is told once, in words.

step fails, or is late --> tiny op on the device --done--> its own error, or it goes on
                             |
                             +--fails, or is late--> InstanceLost, here and to the owner; nothing more is asked of it

An instance that goes on without its device would answer each prompt with an error at once, and so look idle to whoever
places prompts. Pools on the host are those of CPUs, which do not die alone: there a model is not watched.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from devices.interface import Device, Memory
from devices.liveness import LivenessCheck, in_a_line
from engine.interface import EngineInfo
from engine.step import Model, PendingStep, StepBatch, StepOutput
from engine.step_limit import queued_s
from telemetry.logs import EventLogger
from wire.errors import InstanceLost, PdserveError

_log = EventLogger("engine")
_LOOKS = 4
"""In the time that a tiny op may take."""

OnLost = Callable[[PdserveError], None]
"""Told once when the device is lost: the instance has to end."""

Guard = Callable[[], AbstractContextManager[object]]
"""Makes what work on a device is done within."""


class DeviceWatch:
    """Knows whether a device was lost. One thread asks things of the device, and another looks after it meanwhile.

    That one is the watch's own, and ends soon after the watch is let go.
    """

    def __init__(
        self, device: Device, on_lost: OnLost, touch_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        """Takes a few bytes of the device. `touch_s` is what a tiny op may take, behind all that is queued."""
        self._touch, self._on_lost, self._touch_s, self._clock = LivenessCheck(device), on_lost, touch_s, clock
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._since: float | None = None  # when what is asked of the device was begun; None while that is nothing
        looking = (weakref.ref(self), touch_s / _LOOKS)
        threading.Thread(target=_look_after, args=looking, name="device-watch", daemon=True).start()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Ask something of the device. Raises InstanceLost where it is lost, before or by this."""
        if self._lost is not None:
            raise InstanceLost(self._lost)
        self._since = self._clock()
        try:
            yield
        except Exception as error:
            lost = self._judge(error)
            if lost is not None:
                raise lost from error
            raise
        finally:
            self._since = None

    def look(self) -> bool:
        """Try the device where what is asked of it takes too long; return whether it is there, as far as is known."""
        since = self._since
        if since is not None and self._clock() - since > self._touch_s:
            self._judge(TimeoutError(f"what was asked of it is not done after {self._touch_s:g} s"))
        return self._lost is None

    def _judge(self, error: Exception) -> InstanceLost | None:
        with self._lock:
            if self._lost is not None:
                return InstanceLost(self._lost)
            why = self._touch.why_not(self._touch_s)
            if why is None:
                return None
            self._lost = f"{why} (after {in_a_line(error)}); without it this instance cannot go on"
            lost = InstanceLost(self._lost)
        _log.error("device_lost", error, reason=why)
        self._on_lost(lost)
        return lost


def _look_after(watch: "weakref.ref[DeviceWatch]", interval_s: float) -> None:
    """Look now and then, until the device or the watch is gone: a wait for a device that hangs has no end."""
    while True:
        time.sleep(interval_s)
        found = watch()
        if found is None or not found.look():
            return
        del found


class WatchedModel:
    """Implements Model over another one, all of whose work on the device is guarded."""

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
        """See Model: what is on a lost device goes with the process."""
        self._model.close()


class _WatchedStep:
    """Implements Pending."""

    def __init__(self, pending: PendingStep, watch: DeviceWatch) -> None:
        self._pending, self._watch = pending, watch

    def collect(self) -> StepOutput:
        """See Pending."""
        with self._watch.guard():
            return self._pending.collect()


def guard_of(device: Device, on_lost: OnLost, step_s: float) -> Guard:
    """Return what work on this device is done within; nothing where it cannot be lost alone.

    A step may take `step_s`: until those that are queued had their time the device is not lost.
    """
    return nullcontext if device.traits.pools_on_host else DeviceWatch(device, on_lost, queued_s(step_s)).guard


def watched(model: Model, device: Device, on_lost: OnLost, step_s: float) -> Model:
    """Return the model, watched where its device is one that can be lost alone; `step_s` as in guard_of."""
    return model if device.traits.pools_on_host else WatchedModel(model, DeviceWatch(device, on_lost, queued_s(step_s)))
