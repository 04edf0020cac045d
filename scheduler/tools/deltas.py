"""What a parser of tool calls returns, and the interface of all parsers. Pure: text in, text and calls out."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class CallDelta:
    """New text of call `index` of a choice: its name, only in its first delta, and more of its arguments.

    The stage that runs the parser sets `call_id` in a call's first delta if the model did not write it.
    """

    index: int
    name: str | None = None
    arguments: str = ""
    call_id: str | None = None


@dataclass(slots=True)
class ParsedText:
    """New text of calls; `texts` is the text outside of them: (calls before it, text, whether it is content).

    The client does not get other text between and after calls.
    """

    calls: list[CallDelta] = field(default_factory=list)
    texts: list[tuple[int, str, bool]] = field(default_factory=list)

    @property
    def content(self) -> str:
        """Return what is content."""
        return "".join(text for _, text, is_content in self.texts if is_content)

    def begin_call(self, index: int, name: str, call_id: str | None = None) -> None:
        """Add the first delta of a call."""
        self.calls.append(CallDelta(index, name, call_id=call_id))

    def add_arguments(self, index: int, text: str) -> None:
        """Add arguments, to the last delta if it is of the same call."""
        if self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += text
        elif text:
            self.calls.append(CallDelta(index, arguments=text))

    def extend(self, last: "ParsedText") -> None:
        """Add the output that follows, and join the deltas of each call into one."""
        self.texts += last.texts
        self.calls = list(joined([*self.calls, *last.calls]))


def joined(deltas: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """Return each call as one delta with all of its arguments."""
    texts: dict[int, list[str]] = {}
    first: dict[int, CallDelta] = {}
    for delta in deltas:
        first.setdefault(delta.index, delta)
        texts.setdefault(delta.index, []).append(delta.arguments)
    return tuple(CallDelta(at, one.name, "".join(texts[at]), one.call_id) for at, one in first.items())


class ToolCallParser(Protocol):
    """Finds the calls in one choice's text, which arrives in pieces.

    Its joined output does not depend on how the text is split. It never raises: what is not a call
    stays content. Text that may become a marker is held back until it is clear, at the latest until `flush`.
    """

    def push(self, text: str) -> ParsedText:
        """Return what is new after `text`."""
        ...

    def flush(self) -> ParsedText:
        """Return what was held back, at the end of the text."""
        ...
