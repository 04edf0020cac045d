"""Check the rest of a step on a device: sampler, memory, events and graphs."""

import functools
from collections.abc import Iterator

import numpy as np
import torch

from devices.interface import Device
from engine.device_modules import find_nucleus
from engine.sampling.counter_hash import uniform
from engine.sampling.sampler import TorchChooser, sample
from engine.step import SampleRow
from pdserve.selftest.check import NotHere, SelftestCheck, Wrong
from wire.kv_layout import KvTensor, PoolLayout
from wire.types import SamplingParams

_ROWS, _VOCAB = 24, 1024


def op_checks(device: Device) -> Iterator[SelftestCheck]:
    """Yield the checks."""
    run = functools.partial
    yield SelftestCheck("sampler", "greedy", run(_greedy, device))
    yield SelftestCheck("sampler", "seeded draws", run(_drawn, device))
    yield SelftestCheck("sampler", "top_k, top_p and banned tokens", run(_filtered, device))
    yield SelftestCheck("memory", "a KV pool, its alignment and events", run(_pool, device))
    yield SelftestCheck("graphs", "captured work on new inputs", run(_graph, device))


def _greedy(device: Device) -> str:
    logits = _logits()
    got = _sampled(device, logits, [_row(i, temperature=0.0) for i in range(_ROWS)])
    _check_equal(got, logits.argmax(axis=1).tolist())
    return f"{_ROWS} rows of {_VOCAB} as chosen by numpy"


def _drawn(device: Device) -> str:
    """Compare with the inverse CDF of each row's random number, in float64 by numpy."""
    logits, rows = _logits(), [_row(i, temperature=0.7, seed=11 + i) for i in range(_ROWS)]
    weights = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float64) / 0.7)
    chances = weights.cumsum(axis=1) / weights.sum(axis=1, keepdims=True)
    numbers = [uniform(11 + i, 0, 3 + i) for i in range(_ROWS)]
    wanted = [
        int(np.searchsorted(chance, number, side="right")) for chance, number in zip(chances, numbers, strict=True)
    ]
    _check_equal(_sampled(device, logits, rows), wanted)
    return f"{_ROWS} rows as drawn by numpy with the same numbers"


def _filtered(device: Device) -> str:
    logits = _logits()
    best = logits.argsort(axis=1)[:, ::-1]
    rows = [
        *(_row(i, temperature=1.0, seed=i, top_k=1) for i in range(8)),
        *(_row(i, temperature=1.0, seed=i, top_p=1e-6) for i in range(8, 16)),
        *(_row(i, banned=(int(best[i, 0]),), temperature=0.0) for i in range(16, _ROWS)),
    ]
    wanted = [int(best[i, 0 if i < 16 else 1]) for i in range(_ROWS)]
    _check_equal(_sampled(device, logits, rows), wanted)
    return f"{_ROWS} rows"


def _pool(device: Device) -> str:
    layout = PoolLayout([KvTensor(0, name, 2, 16, "float32") for name in ("k", "v")], num_blocks=8, block_size=16)
    pool = device.make_pool(layout)
    try:
        tensor = getattr(pool, "tensor", None)
        if tensor is None:
            tensor = torch.frombuffer(pool.buffer, dtype=torch.uint8)
        if tensor.data_ptr() % device.traits.pool_alignment:
            raise Wrong(f"the pool is at {tensor.data_ptr():#x}, not a multiple of {device.traits.pool_alignment}")
        sent = torch.randint(0, 256, (layout.total_bytes,), dtype=torch.uint8)
        tensor.copy_(sent)
        mark = device.event()
        mark.record()
        with device.new_stream()():
            mark.wait()
            back = tensor.to("cpu", copy=True)
        mark.synchronize()
        if not mark.is_done:
            raise Wrong("an event is not done after waiting for it")
        if not torch.equal(back, sent):
            raise Wrong("the bytes read back differ from those written")
    finally:
        pool.close()
    now = device.memory()
    return f"{now.free / 2**30:.1f} of {now.total / 2**30:.1f} GiB free"


def _graph(device: Device) -> str:
    if not device.captures_graphs:
        raise NotHere("this device does not capture graphs")
    place = device.torch_device
    numbers, weight = torch.zeros(4, 64, device=place), torch.eye(64, device=place) * 3
    made = torch.zeros(4, 64, device=place)

    def run() -> None:
        torch.mm(numbers, weight, out=made)

    graph = device.capture(run)
    for value in (1.0, 2.0):
        numbers.fill_(value)
        graph.replay()
        device.synchronize()
        if not torch.equal(made.cpu(), torch.full((4, 64), 3 * value)):
            raise Wrong(f"a replay on {value} gave {float(made[0, 0]):g} instead of {3 * value:g}")
    return "replayed twice"


def _logits() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return [_ROWS, _VOCAB] logits whose order does not depend on a device's rounding."""
    return np.random.default_rng(3).normal(scale=4, size=(_ROWS, _VOCAB)).astype(np.float32)


def _row(number: int, *, banned: tuple[int, ...] = (), **params: float) -> SampleRow:
    sampling = SamplingParams(max_tokens=1, **params)  # type: ignore[arg-type]
    return SampleRow(number, sampling, 0, 3 + number, banned)


def _sampled(
    device: Device, logits: np.ndarray[tuple[int, int], np.dtype[np.float32]], rows: list[SampleRow]
) -> list[int]:
    chooser = TorchChooser(find_nucleus(device, _VOCAB))
    with torch.inference_mode():
        sampled = sample(torch.from_numpy(logits.copy()).to(device.torch_device), rows, chooser)
    if sampled.failures:
        raise Wrong(f"row {sampled.failures[0][0]}: {sampled.failures[0][1]}")
    return [int(token) for token in sampled.token_ids]


def _check_equal(got: list[int], wanted: list[int]) -> None:
    other = [i for i, (one, two) in enumerate(zip(got, wanted, strict=True)) if one != two]
    if other:
        first = other[0]
        raise Wrong(
            f"{len(other)} of {len(wanted)} rows differ: row {first} has {got[first]} instead of {wanted[first]}"
        )
