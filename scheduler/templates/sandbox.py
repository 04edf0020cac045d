"""The process that renders chat templates, with limits on files, memory and CPU time.

child.py starts it with the CPU seconds per render as argument; frame_kinds.py has the messages on its socket.
SIGPROF kills it when a render exceeds this time: even one operation on a huge number cannot block it for longer.
"""

import contextlib
import functools
import gc
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jinja2

from processes.child_limits import cpu_limit
from processes.frames import frame, read_frame
from scheduler.templates.content_format import ContentFormat, expected_content_format
from scheduler.templates.conversation import cut_at_mark, left_open, shaped
from scheduler.templates.environment import environment
from scheduler.templates.frame_kinds import CHANGED, ERROR, READY, TEXT

MAX_OUTPUT_CHARS = 8 * 2**20

_RENDER_BYTES = 64 * 2**20  # for a render, beyond the idle process and four times its job
_KEPT_BYTES = 16 * 2**20  # a render may leave this much allocated
_COPIES = 4  # of each job: received, parsed, rendered, joined
_ERROR_CHARS = 500
_WARM_UP = "{% for a in [1] %}{{ strftime_now('%Y') }}{{ a | tojson | pprint | wordwrap }}{{ lipsum() }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A template ready to render, and the content format it expects."""

    source: str
    template: jinja2.Template
    content_format: ContentFormat


Compile = Callable[[str], CompiledTemplate]


def compiler() -> Compile:
    """Return a function that compiles templates and caches the last few."""
    jinja = environment()

    def compiled(source: str) -> CompiledTemplate:
        parsed = jinja.parse(source)
        content_format = expected_content_format(parsed)  # first, because compiling modifies the parsed template
        return CompiledTemplate(source, jinja.from_string(parsed), content_format)

    return functools.lru_cache(maxsize=8)(compiled)


def answer(source: str, job: bytes, compiled: Compile) -> tuple[bytes, bytes]:
    """Render one job; any error is returned as its answer."""
    try:
        return TEXT, render(compiled(source), **json.loads(job)).encode()
    except OSError:
        return ERROR, b"OSError: a chat template must not open files"  # the system's message would name a file of ours
    except Exception as error:  # noqa: BLE001  # a template may raise anything
        return ERROR, f"{type(error).__name__}: {error}"[:_ERROR_CHARS].encode(errors="replace")


def render(
    compiled: CompiledTemplate, context: dict[str, Any] | None, content_format: str = "auto",
    continue_final_message: bool = False, image_text: str = "",
) -> str:  # fmt: skip
    """Return the text, "" without a context. Raises ValueError beyond MAX_OUTPUT_CHARS, and the template's errors."""
    if context is None:
        return ""
    expected_format = compiled.content_format if content_format == "auto" else ContentFormat(content_format)
    messages = shaped(context.get("messages", ()), expected_format, image_text)
    if not continue_final_message:
        return _generate(compiled.template, context | {"messages": messages})
    messages, text = left_open(messages, compiled.source)
    return cut_at_mark(_generate(compiled.template, context | {"messages": messages}), text)


def main(connection: socket.socket, seconds: float) -> None:
    """Answer jobs until the connection ends; `seconds` is the CPU time for each."""
    compiled, source = compiler(), connection.makefile("rb")
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    _warm_up(compiled)
    _give_up_the_rest(statm)
    idle_bytes = _address_bytes(statm)
    connection.sendall(frame(READY))
    template = ""
    while (changed := read_frame(source.read)) is not None and (job := read_frame(source.read)) is not None:
        if changed:
            template = changed.removeprefix(CHANGED).decode()
        taken_bytes = len(template) + len(job)
        _limit_memory(idle_bytes + _RENDER_BYTES + _COPIES * taken_bytes)
        with cpu_limit(seconds):
            kind, text = answer(template, job, compiled)
        ends = _has_grown(statm, idle_bytes + _KEPT_BYTES + taken_bytes + len(text))
        connection.sendall(frame(kind.upper() if ends else kind, text))
        if ends:
            return


def _generate(template: jinja2.Template, context: dict[str, Any]) -> str:
    parts, size = [], 0
    for part in template.generate(context):
        size += len(part)
        if size > MAX_OUTPUT_CHARS:
            raise ValueError(f"the chat template wrote more than {MAX_OUTPUT_CHARS} characters")
        parts.append(part)
    return "".join(parts)


def _warm_up(compiled: Compile) -> None:
    """Make jinja and the libraries load their files now: opening files is impossible later."""
    import html
    import unicodedata  # noqa: F401  # used by \N{…} in a text

    html.unescape("")
    for template in (_WARM_UP, "{{ nothing.at.all }}", "{% for %}"):
        answer(template, b'{"context": {}}', compiled)


def _give_up_the_rest(*kept: int) -> None:
    for limit, value in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, max(kept) + 1),
    ):
        resource.setrlimit(limit, (value, value))
    os.chdir("/")


def _has_grown(statm: int, limit_bytes: int) -> bool:
    if _address_bytes(statm) <= limit_bytes:
        return False
    gc.collect()
    return _address_bytes(statm) > limit_bytes


def _limit_memory(address_bytes: int) -> None:
    _, maximum = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, maximum))


def _address_bytes(statm: int) -> int:
    return int(os.pread(statm, 64, 0).split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the scheduler has exited
        main(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[3]))
