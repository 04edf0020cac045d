"""Read a call written as an object, `{"name": …, "arguments": …}`. Pure."""

import re

from scheduler.tools.call_reader import CallReader, Steps
from scheduler.tools.json_value import JsonValueEnd, raw_field


class CallObject:
    """The form of such calls: `keys` are the names that the arguments may have.

    A `marker` before the arguments ends it, and so does a text that is too long: then it is not a call of this form.
    """

    def __init__(self, *keys: str, marker: str | None = None) -> None:
        self._keys = keys
        self._marker = marker
        self._head = re.compile(
            rf'\s*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:{"|".join(keys)})"\s*:\s*(?=["{{\[\-\dtfn])'
        )

    def read(self, reader: CallReader) -> Steps[bool]:
        """Read up to the end of the arguments; False, and nothing is read, if the call does not begin with its name."""
        head = yield from reader.head(self._head, self._marker)
        name = None if head is None else text_of(head.group(1))
        if head is None or name is None:
            reader.text = reader.text if head is None else head.group() + reader.text
            return False
        reader.begin_call(name)
        yield from reader.json_arguments()
        return True

    def read_list(self, reader: CallReader) -> Steps[None]:
        """Read calls one after another, with what separates them, up to other text or what is no call."""
        while True:
            reader.pending((yield from reader.run_of(_BETWEEN)))
            if reader.next_sign != "{":
                return
            if (yield from self.read(reader)):
                if (yield from reader.rest_of_object()):
                    reader.end_call()
                continue
            taken: list[str] = []
            yield from reader.json_value(taken.append, JsonValueEnd())
            text = "".join(taken)
            if not self.add_whole(reader, text):
                reader.not_a_call(text)
                return

    def add_whole(self, reader: CallReader, text: str) -> bool:
        """Add a call with its fields in any order; return whether `text` is one."""
        import orjson  # not with the flags, which list the formats: tables are checked before heavy imports

        try:
            call = orjson.loads(text)
        except orjson.JSONDecodeError:
            return False
        name = call.get("name") if isinstance(call, dict) else None
        key = next((key for key in self._keys if isinstance(call, dict) and key in call), None)
        if not isinstance(name, str) or not name or key is None:
            return False
        reader.begin_call(name)
        reader.arguments(raw_field(text, key) or "")
        reader.end_call()
        return True


def text_of(literal: str) -> str | None:
    """Return the text of a JSON string, None if it is empty or invalid."""
    import orjson  # as above

    try:
        text = orjson.loads(literal)
    except orjson.JSONDecodeError:
        return None
    return text if isinstance(text, str) and text else None


_BETWEEN = " \t\r\n,;[]"
