"""Text profiles of hand-offs on both sides: phases on P, code locations and CPU seconds of threads on P and D."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.kv.pair import Ours, medians_of
from benchmarks.kv.rounds import print_progress
from benchmarks.kv.shapes import BLOCK_SIZE, MIB, shape_named
from benchmarks.kv.speed import CHUNK, Load, loads, start_ours

_PHASES = {
    "reserved_s": "ticket from D",
    "begun_s": "begin",
    "put_s": "put and commit calls",
    "acked_s": "last call to ack",
}


_IDLE = ("line-accept", "kv-accept", "kv-sweep")  # always waiting


def profile_loads(transport: str, sizes_mib: Sequence[int], rounds: int, least_bytes: int) -> Iterator[str]:
    """Yield the lines for each load, sent at least `rounds` times and until it totals about `least_bytes`.

    Sampling is slow: use the shares, not the times.
    """
    shape, work = shape_named("default"), loads(sizes_mib)
    with ExitStack() as stack:
        ours = start_ours(stack, transport, max(load.num_bytes for load in work), profile=True)
        for pair in ours.values():
            for load in work:
                print_progress(f"profile of {pair.name}, {load.name}")
                tokens = shape.tokens_of(load.num_bytes)
                yield from _profile(pair, load, tokens, max(rounds, least_bytes // load.num_bytes))


def profile_small(transport: str, hand_offs: int) -> Iterator[str]:
    """Yield the lines for 64-token prompts of the fake pool."""
    shape = shape_named("fake")
    with Ours(transport, shape, 16 * MIB // (shape.token_bytes * BLOCK_SIZE), profile=True) as pair:
        print_progress(f"profile of {pair.name}, 64 tokens of the fake pool")
        yield from _profile(pair, Load("64 tokens, fake pool", 64 * shape.token_bytes, CHUNK), 64, hand_offs)


def _profile(pair: Ours, load: Load, tokens: int, times: int) -> Iterator[str]:
    pair.hand(tokens=tokens, chunk=load.chunk or tokens)
    sides = {"P": pair.prefills[0], "D": pair.decodes[0]}
    for side in sides.values():
        side.ask(op="profile")  # discards the samples so far
    took = medians_of([pair.hand(tokens=tokens, chunk=load.chunk or tokens) for _ in range(times)])
    yield f"\n## {pair.name}, {load.name}, {times} times: {1e3 * took['total_s']:.2f} ms reserve to ack"
    yield "   " + ", ".join(f"{words} {1e3 * took[key]:.2f} ms" for key, words in _PHASES.items())
    for name, side in sides.items():
        yield from _describe_side(name, side.ask(op="profile"))


def _describe_side(name: str, seen: dict[str, Any]) -> Iterator[str]:
    for thread, cpu in seen["cpu"].items():
        if cpu["user_s"] + cpu["kernel_s"] >= 0.01:
            yield f"   {name} {thread}: {cpu['user_s']:.2f} s user, {cpu['kernel_s']:.2f} s kernel"
    for place in seen["places"]:
        if place["share"] >= 0.02 and place["thread"] not in _IDLE:
            yield f"   {name} {100 * place['share']:5.1f}% {place['thread']:14} {place['place']}"
