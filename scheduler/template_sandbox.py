"""The process that renders chat templates: no file of ours, little memory, one second at a time.

Run as a script by templates.py. Over stdin and stdout go messages of a 4-byte big-endian length and JSON:
{"template", "context"} in, {"text"} or {"error"} out. It ends when stdin does.
"""

import functools
import json
import resource
import struct
import sys
import time
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARS = 8 * 2**20
_MEMORY_BYTES = 512 * 2**20
_CPU_S = 2


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it only prints them."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates are written for."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return made


def render(template: jinja2.Template, context: dict[str, Any]) -> str:
    """Return the text. Raises ValueError past MAX_OUTPUT_CHARS and whatever the template raises."""
    parts, size = [], 0
    for part in template.generate(**context):
        size += len(part)
        if size > MAX_OUTPUT_CHARS:
            raise ValueError(f"the chat template wrote more than {MAX_OUTPUT_CHARS} characters")
        parts.append(part)
    return "".join(parts)


def answer(request: bytes, compiled: Any) -> bytes:
    """Render one request; whatever goes wrong is the answer's `error`."""
    try:
        message = json.loads(request)
        reply = {"text": render(compiled(message["template"]), message["context"])}
    except Exception as error:  # noqa: BLE001  # the template is not ours: any exception is its own
        reply = {"error": f"{type(error).__name__}: {error}"[:500]}
    return json.dumps(reply).encode()


def main() -> None:
    """Answer requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled = functools.lru_cache(maxsize=8)(environment().from_string)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (request := _read(source)) is not None:
        _limit_cpu()
        reply = answer(request, compiled)
        sink.write(struct.pack(">I", len(reply)) + reply)
        sink.flush()


def _read(source: BinaryIO) -> bytes | None:
    header = source.read(4)
    return source.read(struct.unpack(">I", header)[0]) if len(header) == 4 else None


def _limit_cpu() -> None:
    """RLIMIT_CPU counts the process's whole life, so it moves on with every render."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + _CPU_S, hard))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
