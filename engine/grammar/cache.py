"""Cache of compile results and refusals: evicts the least recently used, bounded by bytes. Pure; the owner locks it."""

from collections import OrderedDict
from dataclasses import dataclass

from engine.grammar.matcher import CompiledGrammar

Outcome = CompiledGrammar | str
"""A grammar, or the message of its refusal (an error object's traceback would grow each time it is raised)."""
_ENTRY_BYTES = 64 * 1024
"""Least cost of an entry: above the measured size of a small grammar (docs/structured-output.md)."""
_REFUSAL_BYTES = 2 * 1024


@dataclass(frozen=True, slots=True)
class _Entry:
    outcome: Outcome
    cost_bytes: int


class OutcomeCache:
    """Outcomes by source key. Mutable, owned by the store."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return the number of outcomes."""
        return len(self._entries)

    def find(self, key: bytes) -> Outcome | None:
        """Return the outcome and mark it as most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.outcome

    def keep(self, key: bytes, outcome: Outcome) -> None:
        """Keep an outcome; evict the least recently used until all fit."""
        self._drop(key)
        entry = _Entry(outcome, _cost_bytes(outcome))
        self._entries[key] = entry
        self.num_bytes += entry.cost_bytes
        while self.num_bytes > self._limit_bytes and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.cost_bytes


def _cost_bytes(outcome: Outcome) -> int:
    if isinstance(outcome, str):
        return _REFUSAL_BYTES + len(outcome)
    return max(outcome.cost_bytes, _ENTRY_BYTES)
