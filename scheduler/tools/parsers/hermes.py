"""Hermes, Qwen2.5 and Qwen3: content, then each call as an object between two markers.

    Let me look.
    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Text between and after calls is left out, as in vLLM. What is between markers and is no call is content. A call that has
all of its arguments ends at the next marker of either kind.
"""

from scheduler.tools.call_object import CallObject, CallState
from scheduler.tools.deltas import ParsedText
from scheduler.tools.json_value import raw_field

BEGIN, END = "<tool_call>", "</tool_call>"
MARKERS = (BEGIN, END)


class HermesParser:
    """Sends a call's name as soon as it is known and its arguments as they come. A ToolCallParser."""

    def __init__(self) -> None:
        self._held = ""  # that may become a marker
        self._blanks: list[str] = []  # before the first call, which are content only if more follows
        self._call: CallObject | None = None
        self._inside: list[str] = []  # of a call that does not begin with its name
        self._num_calls = 0
        self._has_content = False

    def push(self, text: str) -> ParsedText:
        """Return what is new after `text`."""
        parsed = ParsedText()
        while text:
            text = self._outside(text, parsed) if self._call is None else self._within(self._call, text, parsed)
        return parsed

    def flush(self) -> ParsedText:
        """Return what was held back: text, or a call without its end."""
        parsed = ParsedText()
        if self._call is None:
            parsed.content = "" if self._num_calls else "".join(self._blanks) + self._held
        elif self._call.state in (CallState.HEAD, CallState.OTHER):
            self._finish_other("".join([self._call.held, *self._inside, self._held]), "", parsed)
        return parsed

    def _outside(self, text: str, parsed: ParsedText) -> str:
        """Pass content on up to a marker; return the text after it."""
        before, marker, after = self._until(text, BEGIN)
        self._add_content(before, parsed)
        if marker:
            self._call = CallObject(self._num_calls, "arguments", END)
        return after

    def _add_content(self, text: str, parsed: ParsedText) -> None:
        """Add content, which is skipped if it follows a call."""
        if not text:
            return
        if self._num_calls:
            parsed.skipped.append((self._num_calls, text))
            return
        if not self._has_content and text.isspace():
            self._blanks.append(text)
            return
        self._has_content = True
        parsed.content += "".join(self._blanks) + text
        self._blanks.clear()

    def _within(self, call: CallObject, text: str, parsed: ParsedText) -> str:
        """Read a call up to its end; return the text after it."""
        if call.state in (CallState.HEAD, CallState.ARGUMENTS):
            rest = _after_object(call, text, parsed)
            if rest is None:
                return ""
            text = rest
        is_done = call.state is CallState.DONE
        before, marker, rest = self._until(text, *(MARKERS if is_done else (END,)))
        if not is_done:
            self._inside.append(before)
        if not marker:
            return ""
        if is_done:
            self._num_calls += 1
        else:
            self._finish_other("".join(self._inside), END, parsed)
        self._call, self._inside = None, []
        return rest if marker == END else BEGIN + rest

    def _until(self, text: str, *markers: str) -> tuple[str, str, str]:
        """Return what is before the first marker, the marker, and the text after it; hold back what may begin one."""
        text, self._held = self._held + text, ""
        found = min(((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=None)
        if found is not None:
            at, marker = found
            return text[:at], marker, text[at + len(marker) :]
        sure = len(text) - max(overlap_length(text, marker) for marker in markers)
        self._held = text[sure:]
        return text[:sure], "", ""

    def _finish_other(self, inside: str, end: str, parsed: ParsedText) -> None:
        """Send a call that was not sent as it came; if it is none, its text is content."""
        read = _read_call(inside)
        if read is None:
            blanks = [] if self._num_calls else self._blanks
            self._has_content = True
            parsed.content += "".join([*blanks, BEGIN, inside, end])
            self._blanks = []
            return
        parsed.begin_call(self._num_calls, read[0])
        parsed.add_arguments(self._num_calls, read[1])
        self._num_calls += 1


def _after_object(call: CallObject, text: str, parsed: ParsedText) -> str | None:
    """Return the text after what can be sent as it comes, from the start if that is nothing; None if it goes on."""
    text = call.push(text, parsed)
    if call.state is CallState.OTHER:
        text, call.held = call.held, ""
        return text
    return text if call.state is CallState.DONE else None


def overlap_length(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that begins `marker`."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


def _read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as they are written, of a call with its fields in any order."""
    import orjson  # not with the flags, which list the formats: tables are checked before heavy imports

    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    name = call.get("name") if isinstance(call, dict) else None
    arguments = raw_field(text, "arguments") if isinstance(call, dict) else None
    return (name, arguments) if isinstance(name, str) and name and arguments is not None else None
