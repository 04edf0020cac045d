"""Contestants measured in turn, round by round, on cold caches, so that other load disturbs all alike."""

import ctypes
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

_MAX_EVICTED = 512 << 20


class Cache:
    """Owner of memory larger than the last-level cache; writing it evicts everything else."""

    def __init__(self, max_bytes: int = _MAX_EVICTED) -> None:
        self._size = min(max_bytes, 2 * _cache_bytes())
        self._scratch = (ctypes.c_char * self._size)()
        self._value = 0

    def evict(self) -> None:
        """Write all of it."""
        self._value = (self._value + 1) % 256
        ctypes.memset(self._scratch, self._value, self._size)


def in_turn(contestants: Mapping[str, Callable[[], float]], rounds: int, cache: Cache) -> dict[str, list[float]]:
    """Return each contestant's figure of every round, each measured on cold caches; the order rotates."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            cache.evict()
            figures[name].append(contestants[name]())
    return figures


def ratio_of(ours: list[float], theirs: list[float]) -> float:
    """Return the median over the rounds of theirs / ours; for seconds this is our speed relative to theirs."""
    return median(b / a for a, b in zip(ours, theirs, strict=True))


def print_progress(text: str) -> None:
    """Write a progress line."""
    print(f"kv_transfer: {text}", file=sys.stderr, flush=True)


def _cache_bytes() -> int:
    sizes = [64 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1))
    return max(sizes)
