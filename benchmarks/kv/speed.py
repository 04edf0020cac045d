"""Bandwidth of one hand-off by size, and layer by layer as in service, with copies and peers in the same rounds."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from benchmarks.kv import peers
from benchmarks.kv.pair import Ours
from benchmarks.kv.peers import Contestant
from benchmarks.kv.rounds import Cache, in_turn, print_progress, ratio_of
from benchmarks.kv.shapes import BLOCK_SIZE, MIB, shape_named
from benchmarks.kv.table import Row

CHUNK = 512
PATTERN_TOKENS = (512, 4096)
GOAL_FROM_MIB = 64
FASTER_FROM_MIB = 16


@dataclass(frozen=True, slots=True)
class Rival:
    """A peer, and the fraction of its speed that ours must reach with the digest off and on (None: no goal)."""

    make: Callable[[int], Contestant]
    name: str
    off: float | None
    on: float | None
    goal_from_mib: int = GOAL_FROM_MIB


_COPY = Rival(peers.Copy, "plain copy", 0.80, 0.60)
RIVALS = {
    "shm": (_COPY, Rival(peers.nixl, "NIXL, default UCX", 1.0, None, FASTER_FROM_MIB)),
    "tcp": (
        Rival(lambda _: peers.Iperf(), "iperf3, one stream", 0.90, 0.75),
        Rival(peers.nixl_tcp, "NIXL, UCX_TLS=tcp", 1.0, None, FASTER_FROM_MIB),
        Rival(peers.mooncake, "Mooncake, TCP", 1.0, None, FASTER_FROM_MIB),
    ),
}
_OTHERS = (Rival(peers.Copy, "plain copy", None, None),)


@dataclass(frozen=True, slots=True)
class Load:
    """One hand-off's size in bytes, put a layer at a time or chunk by chunk."""

    name: str
    num_bytes: int
    chunk: int | None = None


def loads(sizes_mib: Sequence[int]) -> list[Load]:
    """Return the sizes, and prompts of the default model layer by layer in chunks of 512 tokens."""
    shape = shape_named("default")
    found = [Load(f"{size} MiB", shape.tokens_of(size * MIB) * shape.token_bytes) for size in sizes_mib]
    for tokens in PATTERN_TOKENS:
        num_bytes = tokens * shape.token_bytes
        if num_bytes <= max(sizes_mib) * MIB:
            found.append(Load(f"{tokens} tokens by layers ({num_bytes // MIB} MiB)", num_bytes, CHUNK))
    return found


def measure_speed(transport: str, sizes_mib: Sequence[int], rounds: int, cache: Cache) -> list[Row]:
    """Return the rows of one transport."""
    work, rows = loads(sizes_mib), []
    maximum = max(load.num_bytes for load in work)
    with ExitStack() as stack:
        try:
            ours = start_ours(stack, transport, maximum)
        except RuntimeError as error:
            return [Row(f"{transport}, every size", skipped=str(error))]
        rivals = []
        for rival in RIVALS.get(transport, _OTHERS):
            try:
                made = rival.make(maximum)
            except (peers.Missing, RuntimeError) as error:
                rows.append(Row(f"{transport}, every size", peer_name=rival.name, skipped=str(error)))
                continue
            stack.callback(made.close)
            rivals.append((rival, made))
        for load in work:
            print_progress(f"{transport} {load.name}: {', '.join(pair.name for pair in ours.values())} in turn with "
                f"{', '.join(rival.name for rival, _ in rivals)}")  # fmt: skip
            rows += _measure_load(transport, load, ours, rivals, rounds, cache)
    return rows


def start_ours(stack: ExitStack, transport: str, num_bytes: int, **options: bool) -> dict[bool, Ours]:
    """Start a pair with the digest off and one with it on; each pool holds `num_bytes`."""
    shape = shape_named("default")
    blocks = -(-shape.tokens_of(num_bytes) // BLOCK_SIZE)
    return {on: stack.enter_context(Ours(transport, shape, blocks, digest=on, **options)) for on in (False, True)}


def _measure_load(
    transport: str,
    load: Load,
    ours: dict[bool, Ours],
    rivals: list[tuple[Rival, Contestant]],
    rounds: int,
    cache: Cache,
) -> Iterator[Row]:
    for pair in ours.values():  # warm-ups, and a check of the bytes
        pair.move(load.num_bytes, verify=True, chunk=load.chunk)
    for _, contestant in rivals:
        contestant.move(load.num_bytes, verify=True)
    turns = {pair.name: _mover(pair, load) for pair in ours.values()}
    turns |= {rival.name: _mover(contestant, load) for rival, contestant in rivals}
    seconds = in_turn(turns, rounds, cache)
    for on, pair in ours.items():
        for rival, _ in rivals:
            goal = rival.on if on else rival.off
            mine, theirs = seconds[pair.name], seconds[rival.name]
            yield Row(
                f"{transport}, {load.name}, digest {'on' if on else 'off'}",
                ours=load.num_bytes / median(mine) / 1e9,
                peer_name=rival.name,
                peer=load.num_bytes / median(theirs) / 1e9,
                ratio=ratio_of(mine, theirs),
                goal=goal if load.num_bytes >= rival.goal_from_mib * MIB else None,
            )


def _mover(contestant: Contestant | Ours, load: Load) -> Callable[[], float]:
    if isinstance(contestant, Ours):
        return lambda: contestant.move(load.num_bytes, chunk=load.chunk)
    return lambda: contestant.move(load.num_bytes)


@contextlib.contextmanager
def both_modes(transport: str, num_bytes: int) -> Iterator[dict[bool, Ours]]:
    """Start pairs as `start_ours` does and end them."""
    with ExitStack() as stack:
        yield start_ours(stack, transport, num_bytes)
