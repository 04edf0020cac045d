"""Find where token sequences diverge. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

Outputs = Sequence[Sequence[int]]
"""The output tokens of every prompt."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first differing token of a prompt; `reference` or `found` is None past that output's end."""

    prompt: int
    position: int
    reference: int | None
    found: int | None

    def __str__(self) -> str:
        found, reference = _token_text(self.found), _token_text(self.reference)
        return f"prompt {self.prompt}, token {self.position}: {found} instead of {reference}"


def first_divergence(reference: Outputs, found: Outputs) -> Divergence | None:
    """Return the first divergence, prompt by prompt, or None when all are equal."""
    divergences = all_divergences(reference, found)
    return divergences[0] if divergences else None


def all_divergences(reference: Outputs, found: Outputs) -> list[Divergence]:
    """Return the first divergence of each prompt that has one."""
    assert len(reference) == len(found), (len(reference), len(found))
    pairs = enumerate(zip(reference, found, strict=True))
    return [part for prompt, (ours, theirs) in pairs if (part := _first(prompt, ours, theirs)) is not None]


def _first(prompt: int, reference: Sequence[int], found: Sequence[int]) -> Divergence | None:
    for position in range(max(len(reference), len(found))):
        expected = reference[position] if position < len(reference) else None
        got = found[position] if position < len(found) else None
        if expected != got:
            return Divergence(prompt, position, expected, got)
    return None


def _token_text(token: int | None) -> str:
    return "nothing" if token is None else str(token)
