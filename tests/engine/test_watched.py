"""After a failed step the device is tested: a step's own fault ends its prompts, a lost device the instance."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from devices.cpu import CpuDevice
from engine.core import EngineCore
from engine.step import PendingStep, StepBatch
from engine.watched import DeviceWatch, WatchedModel, guard_of, watched
from testing.engine.fake_model import FakeModel
from tests.devices.dying_device import FAULT, DyingDevice
from tests.engine.fake_engines import CONFIG, prompt, run, wanted
from wire.errors import InstanceLost, PdserveError

LATE_S = 0.05
WAIT_S = 300.0  # a thread may come late, too, on a busy machine


class FailingModel(FakeModel):
    """Calls `fails` before each launch, collect and copy; `calls` lists these."""

    def __init__(self, fails: Callable[[str], None], *, runs_ahead: bool = False) -> None:
        super().__init__(replace(CONFIG, runs_ahead=runs_ahead))
        self._fails, self.calls = fails, list[str]()

    def _record_call(self, what: str) -> None:
        self.calls.append(what)
        self._fails(what)

    def launch(self, batch: StepBatch, layer_done: Any = None) -> PendingStep:
        self._record_call("launch")
        pending = super().launch(batch, layer_done)

        class Step:
            def collect(step) -> Any:
                self._record_call("collect")
                return pending.collect()

        return Step()

    def copy_block(self, source: int, target: int) -> None:
        self._record_call("copy_block")
        super().copy_block(source, target)

    def save_blocks(self, block_ids: Any, slots: Any) -> None:
        self._record_call("save_blocks")

    def load_blocks(self, slots: Any, block_ids: Any) -> None:
        self._record_call("load_blocks")


@contextmanager
def serving(
    fails: Callable[[str], None], device: DyingDevice, *, runs_ahead: bool = False, touch_s: float = WAIT_S
) -> Iterator[tuple[EngineCore, FailingModel, list[PdserveError]]]:
    """An engine on a watched model, and what is reported to its owner; its clock stands still."""
    model, reported = FailingModel(fails, runs_ahead=runs_ahead), list[PdserveError]()
    watch = DeviceWatch(device, reported.append, touch_s, clock=lambda: 0.0)
    core = EngineCore(
        WatchedModel(model, watch), max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_size=32
    )  # fmt: skip
    yield core, model, reported
    core.close()


def once(what: str, error: Exception, then: Callable[[], None] = lambda: None) -> Callable[[str], None]:
    """Return what raises `error` at the first `what`, after `then`."""
    left = [error]

    def fails(requested: str) -> None:
        if requested == what and left:
            then()
            raise left.pop()

    return fails


@pytest.mark.parametrize("what", ["launch", "collect"])
def test_a_failed_step_on_a_working_device_ends_its_prompts_only(what: str) -> None:
    with serving(once(what, RuntimeError("this step")), DyingDevice()) as (core, _, reported):
        core.add(prompt("bad", 3))
        (failed,) = run(core).failed
        core.add(prompt("good", 3))
        answers = run(core)

    assert "RuntimeError: this step" in str(failed[1])
    assert answers.tokens["good", 0] == wanted(prompt("good", 3))
    assert reported == []


@pytest.mark.parametrize("what", ["launch", "collect"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_dead_device_ends_the_instance_and_is_not_used_again(what: str, runs_ahead: bool) -> None:
    device = DyingDevice()

    def die() -> None:
        device.fails_with = RuntimeError(FAULT)

    fails = once(what, RuntimeError(FAULT), die)
    with serving(fails, device, runs_ahead=runs_ahead) as (core, model, reported):
        core.add(prompt("a", 3))
        core.add(prompt("b", 3))
        first = run(core).failed
        requests = list(model.calls)
        core.add(prompt("c", 3))
        later = run(core).failed

    (lost,) = reported
    assert isinstance(lost, InstanceLost)
    assert str(lost) == (
        "fake:0 fails a small test op: RuntimeError: CUDA error: an illegal memory access was encountered (after "
        "RuntimeError: CUDA error: an illegal memory access was encountered); without it this instance cannot continue"
    )
    assert {name for name, _ in first} == {"a", "b"}
    assert [name for name, _ in later] == ["c"]
    assert all(str(lost) in str(error) for _, error in (*first, *later))
    assert model.calls == requests


def test_a_hung_device_is_waited_for_up_to_the_limit() -> None:
    device = DyingDevice()
    fails = once("launch", RuntimeError("launch failed"), device.answers.clear)
    with serving(fails, device, touch_s=LATE_S) as (core, _, reported):
        core.add(prompt("a", 3))
        run(core)
    device.answers.set()

    assert [str(error) for error in reported] == [
        "fake:0 did not finish a small test op within 0.05 s (after RuntimeError: launch failed); "
        "without it this instance cannot continue"
    ]


@pytest.mark.parametrize("what", ["launch", "collect"])
def test_a_device_that_hangs_is_lost_even_if_nothing_fails(what: str) -> None:
    device, reported = DyingDevice(), SimpleQueue[PdserveError]()

    def hang(requested: str) -> None:
        if requested == what and device.answers.is_set():
            device.answers.clear()
            assert device.answers.wait(WAIT_S)

    model = WatchedModel(FailingModel(hang), DeviceWatch(device, reported.put, LATE_S))
    core = EngineCore(model, max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_size=32)
    core.add(prompt("a", 3))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, core)
        try:
            lost = reported.get(timeout=WAIT_S)
        finally:
            device.answers.set()
        failed = running.result(WAIT_S).failed

    assert str(lost) == (
        "fake:0 did not finish a small test op within 0.05 s (after TimeoutError: its work has not ended "
        "within 0.05 s)"
        "; without it this instance cannot continue"
    )
    assert [(name, str(lost) in str(error)) for name, error in failed] == [("a", True)], "it gets no further calls"
    assert reported.empty()
    core.close()


def test_a_device_that_computes_is_not_lost_however_long_a_step_takes() -> None:
    device, reported, now = DyingDevice(), list[PdserveError](), [0.0]
    watch = DeviceWatch(device, reported.append, WAIT_S, clock=lambda: now[0])

    with watch.guard():
        now[0] += WAIT_S
        assert watch.check()
        assert device.recorded == 0, "it still has time"
        now[0] += 1.0
        assert watch.check()
        assert device.recorded == 1, "the device was tested"
    now[0] += 2 * WAIT_S
    assert watch.check()
    assert device.recorded == 1, "it gets no calls"
    with watch.guard():
        now[0] += 2 * WAIT_S
        device.fails_with = RuntimeError(FAULT)
        assert not watch.check()

    assert "fails a small test op" in str(reported)


def test_a_device_that_is_full_is_not_lost() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
    device = DyingDevice(fails_with=full)
    with serving(once("launch", full), device) as (core, _, reported):
        core.add(prompt("a", 3))
        (failed,) = run(core).failed
        core.add(prompt("good", 3))
        answers = run(core)

    assert "out of memory" in str(failed[1])
    assert (reported, answers.failed) == ([], [])


@pytest.mark.parametrize("what", ["copy_block", "save_blocks", "load_blocks"])
def test_copies_of_blocks_are_guarded_too(what: str) -> None:
    device, reported = DyingDevice(fails_with=RuntimeError(FAULT)), list[PdserveError]()
    model = FailingModel(once(what, RuntimeError(FAULT)))
    guarded = WatchedModel(model, DeviceWatch(device, reported.append, WAIT_S))
    arguments: Any = (1, 2) if what == "copy_block" else ((1,), (2,))

    with pytest.raises(InstanceLost, match="fails a small test op"):
        getattr(guarded, what)(*arguments)
    with pytest.raises(InstanceLost, match="fails a small test op"):
        getattr(guarded, what)(*arguments)

    assert (len(reported), model.calls) == (1, [what])
    model.close()


def test_on_the_cpu_nothing_is_watched() -> None:
    model = FakeModel(CONFIG)

    assert watched(model, CpuDevice(), lambda error: None, 10.0) is model
    model.close()


def fail() -> None:
    raise RuntimeError("a harmless one")


def test_a_device_gets_the_time_of_its_queued_steps() -> None:
    device, reported = DyingDevice(), list[PdserveError]()
    device.answers.clear()
    model = watched(FailingModel(lambda what: fail()), device, reported.append, 0.05)
    guard = guard_of(device, reported.append, 0.05)

    with pytest.raises(InstanceLost, match=r"did not finish a small test op within 0\.1 s"):
        model.copy_block(1, 2)
    with pytest.raises(InstanceLost, match=r"did not finish a small test op within 0\.1 s"), guard():
        fail()
    device.answers.set()

    assert len(reported) == 2, "each of the two watches"
    model.close()
