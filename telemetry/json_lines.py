"""Log records as JSON, one object per line: time, level, component, event, its fields, and the traceback if any.

{"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "component": "requests", "event": "request_done",
 "request_id": "cmpl-…", "prompt_tokens": 12, …}
"""

import json
import logging
import math
import time

_MAX_VALUE = 1000
_MAX_TRACEBACK = 16_000
_OWN = ("time", "level", "component", "event", "message", "exception")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of ASCII; `_` is appended to a field whose name is one of `_OWN`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "component": record.name.removeprefix("pdserve."),
            **_event_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-_MAX_TRACEBACK:]
        return json.dumps(line)


def _event_fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the event and its fields; for a library's log record, its first word as event and its `message`."""
    event = record.args[0] if isinstance(record.args, tuple) and record.args else None
    name, fields = getattr(event, "name", None), getattr(event, "fields", None)
    if record.msg == "%s" and isinstance(name, str) and isinstance(fields, dict):
        return {"event": name, **{f"{key}_" if key in _OWN else key: _to_plain(value) for key, value in fields.items()}}
    message = record.getMessage()
    return {"event": message.partition(" ")[0][:_MAX_VALUE], "message": _to_plain(message)}


def _to_plain(value: object) -> object:
    """Return finite numbers, booleans and None unchanged, anything else as text cut at _MAX_VALUE characters."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = str(value)
    return text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + "…"
