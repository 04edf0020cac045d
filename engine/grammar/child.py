"""The compiling process, `python -P -m engine.grammar.child FD PARENT_PID`: its crash does not end the instance.

    the parent sends, until EOF      | the child answers
    {"tokenizer", "limits"}, once    | {"ready": true} or {"refused": message}
    {"kind", "text", "whitespace"}   | {"form", "cost_bytes"} or {"refused": message}

The child ends by SIGPROF when one compile exceeds its CPU time, or by a failed allocation beyond the memory limit. The
parent kills it after a timeout, and the kernel kills it when the parent's thread ends.
"""

import ctypes
import gc
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from engine.grammar.backend import make_backend
from engine.grammar.interface import Backend
from engine.grammar.limits import MESSAGE_BYTES, MIB, GrammarLimits
from engine.grammar.source import GrammarKind, GrammarSource
from engine.grammar.tokenizer_file import TokenizerFile
from processes.child_limits import cpu_limit, end_with
from processes.frames import receive_object, send_object
from wire.errors import InvalidGrammar, NotInstalled

_STACK_BYTES = MIB  # a text that does not overflow it fits the stack of a parent's thread too


def main(descriptor: int) -> None:
    """Serve the connection on `descriptor` until the parent closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles a terminal's Ctrl-C
    with socket.socket(fileno=descriptor) as connection:
        hello = receive_object(connection, MESSAGE_BYTES)
        if hello is None:
            return
        limits = GrammarLimits(**hello["limits"])
        try:
            backend = make_backend(TokenizerFile.from_json(hello["tokenizer"]), limits)
        except (InvalidGrammar, NotInstalled) as error:
            send_object(connection, {"refused": str(error)})
            return
        _bound_memory(limits)
        send_object(connection, {"ready": True})
        while (request := receive_object(connection, MESSAGE_BYTES)) is not None:
            send_object(connection, _answer(backend, request, limits))


def _answer(backend: Backend, request: dict[str, Any], limits: GrammarLimits) -> dict[str, Any]:
    source = GrammarSource(GrammarKind(request["kind"]), request["text"], request["whitespace"])
    try:
        with cpu_limit(limits.cpu_s):
            form, cost_bytes = _measured(backend, source)
    except InvalidGrammar as error:
        return {"refused": str(error)}
    except MemoryError:
        limit_mb = limits.memory_bytes // MIB
        return {"refused": f"compiling the grammar takes more than {limit_mb} MB of memory, the limit"}
    except RecursionError:
        return {"refused": "the grammar is nested too deep to be compiled"}
    for what, size, limit in (
        ("compiled text", len(form), limits.form_bytes),
        ("compiled form in memory", cost_bytes, limits.cache_bytes),
    ):
        if size > limit:
            return {"refused": f"the grammar's {what} has {size} bytes, but the limit is {limit}"}
    return {"form": form, "cost_bytes": cost_bytes}


def _measured(backend: Backend, source: GrammarSource) -> tuple[str, int]:
    """Compile and build; return the form, and the memory that the built grammar takes."""
    _give_back_memory()
    before = _status_bytes("RssAnon")
    form = backend.compile(source)
    built = backend.build(form)
    _give_back_memory()
    cost = max(_status_bytes("RssAnon") - before, 0) + len(form)
    del built
    return form, cost


def _give_back_memory() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only; elsewhere the cost is less exact
    if trim is not None:
        trim(0)


def _bound_memory(limits: GrammarLimits) -> None:
    maximum = _status_bytes("VmSize") + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (maximum, maximum))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    main(int(sys.argv[1]))
