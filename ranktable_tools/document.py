"""Walk a JSON document, tracking the path of each value and collecting every problem found."""

import json
from collections.abc import Callable
from dataclasses import dataclass

MAX_ELEMENTS = 4096
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: the rule's code, the JSON path, the value, what was found there, and what to write instead."""

    code: str
    json_path: str
    value: object
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.json_path} {self.found}; {self.advice}"


@dataclass(frozen=True, slots=True)
class ValueFault:
    """The result of a check on an invalid value: the rule's code and what to write instead."""

    code: str
    advice: str


Check = Callable[[str], ValueFault | None]


@dataclass(frozen=True, slots=True)
class Node:
    """One JSON value, its path, and the list that collects its problems."""

    value: object
    json_path: str
    problems: list[Problem]

    def refuse(self, code: str, advice: str) -> None:
        """Record that this value is invalid."""
        self.report(code, f"is {shown(self.value)}", advice)

    def report(self, code: str, found: str, advice: str, value: object = None) -> None:
        """Record a problem of this value; a `value` that is not None is recorded in place of the node's own."""
        shown_value = self.value if value is None else value
        problem = Problem(code, self.json_path or "the file", shown_value, found, advice)
        # Several keys may be read from a value that is not an object; the problem is recorded once.
        if not self.problems or self.problems[-1] != problem:
            self.problems.append(problem)

    def has(self, key: str) -> bool:
        """Return whether this is an object with that key."""
        return isinstance(self.value, dict) and key in self.value

    def child(self, key: str, advice: str) -> "Node | None":
        """Return the member `key`; a missing one is a problem."""
        here = f"{self.json_path}.{key}" if self.json_path else key
        if not isinstance(self.value, dict):
            self.refuse("wrong-type", "must be an object")
            return None
        if key not in self.value:
            self.problems.append(Problem("missing-key", here, None, "is missing", advice))
            return None
        return Node(self.value[key], here, self.problems)

    def elements(self, key: str) -> "list[Node] | None":
        """Return the members of the list under `key`; None if it is not a list or has more than MAX_ELEMENTS."""
        child = self.child(key, "write a list")
        if child is None:
            return None
        if not isinstance(child.value, list):
            child.refuse("wrong-type", "must be a list")
            return None
        if len(child.value) > MAX_ELEMENTS:
            child.report("too-many", f"has {len(child.value)} elements", f"must have at most {MAX_ELEMENTS}", value=[])
            return None
        return [Node(member, f"{child.json_path}[{index}]", self.problems) for index, member in enumerate(child.value)]

    def text(self, key: str, check: Check) -> str | None:
        """Return the string under `key`; None, with a problem recorded, if it is missing or `check` finds a fault."""
        child = self.child(key, "write a string")
        if child is None:
            return None
        if not isinstance(child.value, str):
            child.refuse("wrong-type", "must be a string")
            return None
        fault = check(child.value)
        if fault is not None:
            child.refuse(fault.code, fault.advice)
            return None
        return child.value

    def optional_text(self, key: str, check: Check) -> str | None:
        """Return the string under `key`, or None if the key is absent."""
        return self.text(key, check) if self.has(key) else None


def shown(value: object) -> str:
    """Return a value as one line of JSON, truncated if long."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
