"""The program of a step (native/layer.h), split where Python has to do something in between."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.fused.structs import Instruction, Operation

Pair = tuple[Operation, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Native instructions, and what Python does after them: the layer's attention, or the sum over ranks."""

    instructions: ctypes.Array[Instruction]
    attends: bool = False
    reduces: bool = False
    layer: int = 0


def segments(num_layers: int, *, attends_inside: bool, partial: bool) -> Iterator[Segment]:
    """Yield the segments of all layers, without the logits.

    `attends_inside`: attention is part of the program. `partial`: products are summed over ranks before they are added.
    """
    pending: list[Pair] = []
    for layer in range(num_layers):
        pending.append((Operation.ENTER, layer))
        if attends_inside:
            pending += [(Operation.NOTIFY, layer), (Operation.ATTEND, layer)]
        else:
            yield Segment(instructions(pending), attends=True, layer=layer)
            pending = []
        for half in (Operation.OUT, Operation.MLP):
            pending.append((half, layer))
            if partial:
                yield Segment(instructions(pending), reduces=True, layer=layer)
                pending = [(Operation.ADD, layer)]
    yield Segment(instructions(pending))


def whole(num_layers: int) -> ctypes.Array[Instruction]:
    """Return all layers and the logits as one program, for steps that are entirely native."""
    (layers,) = segments(num_layers, attends_inside=True, partial=False)
    pairs = [(Operation(one.operation), one.layer) for one in layers.instructions]
    return instructions([*pairs, (Operation.HEAD, 0)])


def instructions(pairs: Sequence[Pair]) -> ctypes.Array[Instruction]:
    """Return a native program."""
    return (Instruction * len(pairs))(*(Instruction(operation, layer) for operation, layer in pairs))
