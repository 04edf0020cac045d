"""The parts of the GPU benchmark, one after the other; one that cannot run becomes a row with the reason."""

import argparse
from collections.abc import Callable, Iterator

from benchmarks.card.hand_off import measure_hand_off
from benchmarks.card.layers import measure_layers
from benchmarks.card.limits import h200, measure_limits
from benchmarks.card.pd import measure_pd
from benchmarks.card.peers import measure_peers
from benchmarks.card.rows import Row
from benchmarks.card.shapes import SHAPES, TINY
from benchmarks.card.steps import measure_steps
from benchmarks.card.tensor_parallel import measure_tensor_parallel
from devices.interface import Device
from wire.errors import PdserveError


def measure(args: argparse.Namespace, device: Device) -> Iterator[Row]:
    """Yield the rows of the selected parts."""
    tiny, rounds, judged = args.tiny, args.rounds, not args.tiny
    shapes = [TINY] if tiny else [SHAPES[name] for name in args.shapes]
    limits, rows = measure_limits(device, tiny=tiny, rounds=rounds)
    if args.limits == "h200" and judged:
        limits = h200(limits)

    def steps() -> Iterator[Row]:
        for shape in shapes:
            yield from measure_steps(shape, device, limits, rounds=rounds, judged=judged)

    def layers() -> Iterator[Row]:
        for shape in shapes:
            yield from measure_layers(shape, device, limits, rounds=rounds)

    def peers() -> Iterator[Row]:
        for shape in shapes:
            yield from measure_peers(shape, device, limits, rounds=rounds)

    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "limits": lambda: iter(rows),
        "layers": layers,
        "steps": steps,
        "peers": peers,
        "hand-off": lambda: measure_hand_off(
            device, limits, args.transport, mib=1 if tiny else 1024, rounds=rounds, judged=judged
        ),
        "pd": lambda: measure_pd(
            shapes[0], device, args.transport, ranks=args.ranks, requests=4 if tiny else 20, tiny=tiny
        ),
        "tp": lambda: measure_tensor_parallel(shapes[0], device, tiny=tiny),
    }  # fmt: skip
    for part in args.parts:
        try:
            yield from parts[part]()
        except (RuntimeError, OSError, PdserveError, SystemExit) as error:  # the other parts still run
            yield Row(part, "", note=f"not measured: {' '.join(str(error).split())}")
