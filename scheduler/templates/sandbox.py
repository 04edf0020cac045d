"""The process that renders chat templates: no file, little memory, so many seconds of a processor for each.

child.py starts it with the seconds as argument; frames.py draws what it reads from stdin and writes
to stdout. SIGPROF kills it when a render has used them: not even one number with a billion digits keeps it busy.
"""

import contextlib
import functools
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import jinja2

from scheduler.templates.content_format import ContentFormat, format_taken
from scheduler.templates.conversation import cut_at_mark, left_open, shaped
from scheduler.templates.environment import environment
from scheduler.templates.frames import ERROR, JOB_HEADER, READY, TEMPLATE_AS_BEFORE, TEXT, answer_frame

MAX_OUTPUT_CHARS = 8 * 2**20

_RENDER_BYTES = 64 * 2**20  # what a render may add to the idle process, and to four times its job
_KEPT_BYTES = 16 * 2**20  # what a render may leave behind
_COPIES = 4  # of a job: as it came, as values, as printed, as joined
_ERROR_CHARS = 500
_WARM_UP = "{% for a in [1] %}{{ strftime_now('%Y') }}{{ a | tojson | pprint | wordwrap }}{{ lipsum() }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A template ready to render, and what content it takes."""

    source: str
    template: jinja2.Template
    takes: ContentFormat


Compile = Callable[[str], CompiledTemplate]


def compiler() -> Compile:
    """Return a function that compiles templates and keeps the last few."""
    jinja = environment()

    def compiled(source: str) -> CompiledTemplate:
        parsed = jinja.parse(source)
        takes = format_taken(parsed)  # first: compiling rewrites what was parsed
        return CompiledTemplate(source, jinja.from_string(parsed), takes)

    return functools.lru_cache(maxsize=8)(compiled)


def answer(source: str, job: bytes, compiled: Compile) -> tuple[bytes, bytes]:
    """Render one job; whatever goes wrong is the answer."""
    try:
        return TEXT, render(compiled(source), **json.loads(job)).encode()
    except OSError:
        return ERROR, b"OSError: a chat template opens no file"  # the system's own words would name ours
    except Exception as error:  # noqa: BLE001  # the template is not ours: any exception is its own
        return ERROR, f"{type(error).__name__}: {error}"[:_ERROR_CHARS].encode(errors="replace")


def render(
    compiled: CompiledTemplate, context: dict[str, Any] | None, content_format: str = "auto",
    continue_final_message: bool = False,
) -> str:  # fmt: skip
    """Return the text; no context wants none. Raises ValueError past MAX_OUTPUT_CHARS, and what the template raises."""
    if context is None:
        return ""
    takes = compiled.takes if content_format == "auto" else ContentFormat(content_format)
    messages = shaped(context.get("messages", ()), takes)
    if not continue_final_message:
        return _generate(compiled.template, context | {"messages": messages})
    messages, text = left_open(messages, compiled.source)
    return cut_at_mark(_generate(compiled.template, context | {"messages": messages}), text)


def main(seconds: float) -> None:
    """Answer jobs until stdin ends; each has so many seconds of processor time."""
    compiled, source, sink = compiler(), sys.stdin.buffer, sys.stdout.buffer
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    _warm_up(compiled)
    _give_up_the_rest(statm)
    idle_bytes = _address_bytes(statm)
    _write(sink, READY, b"")
    template = ""
    while (read := _read(source, template)) is not None:
        template, job = read
        taken_bytes = len(template) + len(job)
        _limit_memory(idle_bytes + _RENDER_BYTES + _COPIES * taken_bytes)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        kind, text = answer(template, job, compiled)
        signal.setitimer(signal.ITIMER_PROF, 0)
        ends = _has_grown(statm, idle_bytes + _KEPT_BYTES + taken_bytes + len(text))
        _write(sink, kind.upper() if ends else kind, text)
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
    """Let jinja and the libraries read what they read at first use: afterwards no file opens."""
    import html
    import unicodedata  # noqa: F401  # \N{…} in a text looks here

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


def _read(source: BinaryIO, template: str) -> tuple[str, bytes] | None:
    header = source.read(JOB_HEADER.size)
    if len(header) < JOB_HEADER.size:
        return None
    template_bytes, job_bytes = JOB_HEADER.unpack(header)
    if template_bytes != TEMPLATE_AS_BEFORE:
        template = source.read(template_bytes).decode()
    return template, source.read(job_bytes)


def _write(sink: BinaryIO, kind: bytes, text: bytes) -> None:
    sink.write(answer_frame(kind, text))
    sink.flush()


def _has_grown(statm: int, limit_bytes: int) -> bool:
    if _address_bytes(statm) <= limit_bytes:
        return False
    gc.collect()
    return _address_bytes(statm) > limit_bytes


def _limit_memory(address_bytes: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, most))


def _address_bytes(statm: int) -> int:
    return int(os.pread(statm, 64, 0).split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the scheduler has gone
        main(float(sys.argv[1]))
