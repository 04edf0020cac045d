"""The process that renders chat templates, with limits on files, memory and CPU time.

child.py starts it with the CPU seconds per render as argument; frames.py describes its stdin and stdout.
SIGPROF kills it when a render exceeds them: even a single operation on a huge number cannot block it for longer.
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

_RENDER_BYTES = 64 * 2**20  # of a render, beyond the idle process and four times its job
_KEPT_BYTES = 16 * 2**20  # that a render may leave allocated
_COPIES = 4  # of a job: received, parsed, rendered, joined
_ERROR_CHARS = 500
_WARM_UP = "{% for a in [1] %}{{ strftime_now('%Y') }}{{ a | tojson | pprint | wordwrap }}{{ lipsum() }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A template ready to render, and the content format it expects."""

    source: str
    template: jinja2.Template
    takes: ContentFormat


Compile = Callable[[str], CompiledTemplate]


def compiler() -> Compile:
    """Return a function that compiles templates and caches the last few."""
    jinja = environment()

    def compiled(source: str) -> CompiledTemplate:
        parsed = jinja.parse(source)
        takes = format_taken(parsed)  # first, because compiling modifies the parsed template
        return CompiledTemplate(source, jinja.from_string(parsed), takes)

    return functools.lru_cache(maxsize=8)(compiled)


def answer(source: str, job: bytes, compiled: Compile) -> tuple[bytes, bytes]:
    """Render one job; any error is returned as its answer."""
    try:
        return TEXT, render(compiled(source), **json.loads(job)).encode()
    except OSError:
        return ERROR, b"OSError: a chat template must not open files"  # the system's message would name ours
    except Exception as error:  # noqa: BLE001  # a template may raise anything
        return ERROR, f"{type(error).__name__}: {error}"[:_ERROR_CHARS].encode(errors="replace")


def render(
    compiled: CompiledTemplate, context: dict[str, Any] | None, content_format: str = "auto",
    continue_final_message: bool = False,
) -> str:  # fmt: skip
    """Return the text, "" without a context. Raises ValueError beyond MAX_OUTPUT_CHARS, and the template's errors."""
    if context is None:
        return ""
    takes = compiled.takes if content_format == "auto" else ContentFormat(content_format)
    messages = shaped(context.get("messages", ()), takes)
    if not continue_final_message:
        return _generate(compiled.template, context | {"messages": messages})
    messages, text = left_open(messages, compiled.source)
    return cut_at_mark(_generate(compiled.template, context | {"messages": messages}), text)


def main(seconds: float) -> None:
    """Answer jobs until stdin ends; `seconds` is the CPU time of each."""
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
    with contextlib.suppress(ConnectionError):  # the scheduler has exited
        main(float(sys.argv[1]))
