"""Walk a JSON document, knowing the place of each value and collecting every problem on the way."""

import json
from collections.abc import Callable
from dataclasses import dataclass

_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: its JSON place, what stands there, and what to write instead."""

    place: str
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.place} {self.found}; {self.advice}"


@dataclass(frozen=True, slots=True)
class Node:
    """One JSON value, its place, and the list its problems go to."""

    value: object
    place: str
    problems: list[Problem]

    def refuse(self, advice: str) -> None:
        """Note that this value is wrong."""
        self.problems.append(Problem(self.place or "the file", f"is {shown(self.value)}", advice))

    def at(self, place: str, value: object) -> "Node":
        """Return a node for something found here, like a count."""
        return Node(value, place, self.problems)

    def has(self, key: str) -> bool:
        """Tell whether this is an object with that key."""
        return isinstance(self.value, dict) and key in self.value

    def child(self, key: str, advice: str) -> "Node | None":
        """Return the member `key`; a missing one is a problem."""
        here = f"{self.place}.{key}" if self.place else key
        if not isinstance(self.value, dict):
            self.refuse("must be an object")
            return None
        if key not in self.value:
            self.problems.append(Problem(here, "is missing", advice))
            return None
        return Node(self.value[key], here, self.problems)

    def elements(self, key: str) -> "list[Node] | None":
        """Return the members of the list under `key`; None when it is no list."""
        child = self.child(key, "write a list")
        if child is None:
            return None
        if not isinstance(child.value, list):
            child.refuse("must be a list")
            return None
        return [Node(member, f"{child.place}[{index}]", self.problems) for index, member in enumerate(child.value)]

    def text(self, key: str, wrong: Callable[[str], str | None]) -> str | None:
        """Return the string under `key`; `wrong` says what a bad one should have been, or None for a good one."""
        child = self.child(key, "write a string")
        if child is None:
            return None
        if not isinstance(child.value, str):
            child.refuse("must be a string")
            return None
        advice = wrong(child.value)
        if advice is not None:
            child.refuse(advice)
            return None
        return child.value


def shown(value: object) -> str:
    """Return a value as JSON, on one line, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
