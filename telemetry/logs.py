"""Logs are events with fields: `kv_sent request_id=… blocks=… ms=…`, one line each; clients' text is escaped."""

import logging
import re
import sys
import time
from typing import TextIO

from telemetry.json_lines import JsonFormatter

FORMATS = ("text", "json")
_MAX_VALUE = 1000
_PLAIN = re.compile(rf"[!#-\[\]-~]{{1,{_MAX_VALUE}}}")  # printable ASCII except space, quote and backslash


class LogEvent:
    """An event and its fields. The text is rendered once, and only if a handler writes the line."""

    __slots__ = ("_text", "fields", "name")

    def __init__(self, name: str, fields: dict[str, object]) -> None:
        self.name = name
        self.fields = fields
        self._text: str | None = None

    def __str__(self) -> str:
        """Render it as text."""
        if self._text is None:
            self._text = render(self.name, self.fields)
        return self._text


class EventLogger:
    """Writes events under one component's name."""

    def __init__(self, component: str) -> None:
        self._logger = logging.getLogger(f"pdserve.{component}")

    @property
    def has_info(self) -> bool:
        """Whether `info` writes anything: for events whose fields take long to compute."""
        return self._logger.isEnabledFor(logging.INFO)

    def debug(self, event: str, **fields: object) -> None:
        """Log an event that only a developer wants."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log an event an operator may want."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log an event an operator should look at."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, raised: BaseException | None = None, /, **fields: object) -> None:
        """Log a failure, with the traceback of the exception `raised` if given."""
        self._log(logging.ERROR, event, fields, raised)

    def _log(self, level: int, event: str, fields: dict[str, object], raised: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", LogEvent(event, fields), exc_info=raised)


def render(event: str, fields: dict[str, object]) -> str:
    """Return `event key=value …`; values are escaped, quoted where they hold spaces, and cut at 1,000 characters."""
    return " ".join([event, *(f"{key}={_value(value)}" for key, value in fields.items())])


def configure(level: str = "INFO", stream: TextIO | None = None, log_format: str = "text") -> None:
    """Send pdserve's events to `stream` (standard error by default). Called once, by the process's entry point.

    With `log_format` json, warnings of libraries go there too, so that every line is an object. Raises ValueError for a
    format that is not in FORMATS.
    """
    if log_format not in FORMATS:
        raise ValueError(f"log format {log_format!r} is not one of {', '.join(FORMATS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else _text_formatter())
    root = logging.getLogger("pdserve")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    if log_format == "json":
        logging.getLogger().handlers[:] = [_for_libraries(stream)]


def _text_formatter() -> logging.Formatter:
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    return formatter


def _for_libraries(stream: TextIO | None) -> logging.Handler:
    """Return the handler for libraries' warnings, except uvicorn's: we log the failures of HTTP requests as events."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(lambda record: not record.name.startswith("uvicorn"))
    return handler


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if _PLAIN.fullmatch(text):
        return text
    text = text.encode("unicode_escape").decode("ascii")
    if len(text) > _MAX_VALUE:
        text = text[:_MAX_VALUE] + "…"
    return '"' + text.replace('"', '\\"') + '"' if " " in text or '"' in text or text == "" else text
