"""The cost of a decode step's layers without attention: as transformers writes them, and with the device's ops.

Attention is replaced by a sum of its inputs, so the figures include neither the pool nor its kernels. Steps are
replayed from graphs if the device captures them.
"""

import gc
from collections.abc import Callable, Iterator

import torch

from benchmarks.card.limits import Limits
from benchmarks.card.model import make_network
from benchmarks.card.rows import Row, seconds_of
from benchmarks.card.shapes import Shape
from devices.interface import Device
from engine.attention.registered import NAME, attach, register
from engine.device_modules import replace_modules
from engine.modules.check import SumAttention


@torch.inference_mode()
def measure_layers(shape: Shape, device: Device, limits: Limits, *, rounds: int) -> Iterator[Row]:
    """Yield a row for each implementation and batch: how fast the weights of the layers and the head are read."""
    register()
    network = make_network(shape, device, NAME)
    for who in ("transformers' layers", "pdserve"):
        lines = replace_modules(network, device) if who == "pdserve" else ()
        attach(network, SumAttention())
        for batch in shape.batches:
            run = _step(network, device, batch)
            seconds = seconds_of(run, device.synchronize, rounds)
            weights = (shape.layer_weights + shape.head_weights) * shape.itemsize
            yield Row(
                f"{shape.name} layers without attention, batch {batch}", who, weights / seconds / 1e9, "GB/s",
                limits.read_bytes_s / 1e9, limits.name, None, "; ".join((f"{seconds * 1e3:.3g} ms", *lines)),
            )  # fmt: skip
    del network
    gc.collect()


def _step(network: torch.nn.Module, device: Device, batch: int) -> Callable[[], None]:
    """Return a function that runs one token of each of `batch` sequences."""
    ids = torch.full((1, batch), 7, device=device.torch_device)
    positions = torch.full((1, batch), 40, device=device.torch_device)

    def run() -> None:
        with torch.inference_mode():
            network(input_ids=ids, position_ids=positions, use_cache=False)

    if not device.captures_graphs:
        return run
    graph = device.capture(run)
    return lambda: graph.replay()
