"""The serving process's side of the compiling child: start it, send it sources, kill it, and warm up its successor."""

import os
import signal
from dataclasses import asdict, dataclass
from typing import Any

from engine.grammar.limits import MESSAGE_BYTES, MIB, GrammarLimits
from engine.grammar.source import GrammarSource
from engine.grammar.tokenizer_file import TokenizerFile
from processes.child import ChildProcess
from processes.frames import receive_object, send_object
from telemetry.logs import EventLogger
from wire.errors import DeadlineExceeded, InternalError, InvalidGrammar, Unavailable

_log = EventLogger("grammar")
_STDERR_BYTES = 2000
_OUT_OF_MEMORY = (b"memory allocation", b"bad_alloc", b"MemoryError")


@dataclass(frozen=True, slots=True)
class GrammarForm:
    """The child's result: the form to build from, and the approximate memory of the built grammar."""

    form: str
    cost_bytes: int


class _Died(Exception):
    """The child exited without an answer."""

    def __init__(self, by_signal: int, stderr: bytes) -> None:
        super().__init__(by_signal)
        self.by_signal, self.stderr = by_signal, stderr


class CompilingChild:
    """Owns the child process. One thread uses it, and must outlive each child (see child.py)."""

    def __init__(self, tokenizer: TokenizerFile, limits: GrammarLimits) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._process: ChildProcess | None = None
        self._ready = False

    @property
    def pid(self) -> int | None:
        """The process id of the child that is warm or warming up, None where there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start a child where there is none; it warms up in the background."""
        if self._process is None:
            environ = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # another arena would take 64 MB of the limit
            self._process = ChildProcess("engine.grammar.child", environ=environ, is_silent=True, keeps_stderr=True)
            self._ready = False
            hello = {"tokenizer": self._tokenizer.to_json(), "limits": asdict(self._limits)}
            self._send(hello)

    def compile(self, source: GrammarSource) -> GrammarForm:
        """Compile `source` in the child.

        Raises InvalidGrammar if the child refuses or crashes, Unavailable if no child starts, and
        DeadlineExceeded if it does not answer in time. Retries once if the child was killed from outside.
        """
        try:
            return self._compile_once(source)
        except _Died as death:
            if death.by_signal != signal.SIGKILL:
                raise InvalidGrammar(self._explain(death)) from death
            _log.warning("grammar_child_killed")
        try:
            return self._compile_once(source)
        except _Died as death:
            raise InvalidGrammar(self._explain(death)) from death

    def close(self) -> None:
        """End the child. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _compile_once(self, source: GrammarSource) -> GrammarForm:
        self.start()
        if not self._ready:
            self._await_ready()
        request = {"kind": source.kind, "text": source.text, "whitespace": source.whitespace}
        self._send(request)
        answer = self._receive(self._limits.compile_s, "compiling the grammar")
        if "refused" in answer:
            raise InvalidGrammar(str(answer["refused"]))
        return GrammarForm(str(answer["form"]), int(answer["cost_bytes"]))

    def _await_ready(self) -> None:
        answer = self._receive(self._limits.start_s, "starting the grammar compiler")
        if "refused" in answer:
            self.close()
            raise InvalidGrammar(str(answer["refused"]))
        self._ready = True

    def _send(self, message: dict[str, Any]) -> None:
        """Send `message`; if the child has died, `_receive` raises."""
        assert self._process is not None
        self._process.connection.settimeout(self._limits.compile_s)
        try:
            send_object(self._process.connection, message)
        except ConnectionError:
            return
        except TimeoutError as error:
            self._replace()
            limit_s = self._limits.compile_s
            raise DeadlineExceeded(f"the grammar compiler has read nothing for {limit_s:g} s, the limit") from error

    def _receive(self, timeout_s: float, what: str) -> dict[str, Any]:
        assert self._process is not None
        self._process.connection.settimeout(timeout_s)
        try:
            answer = receive_object(self._process.connection, MESSAGE_BYTES)
        except TimeoutError as error:
            self._replace()
            raise DeadlineExceeded(f"{what} took longer than {timeout_s:g} s, the limit") from error
        except ConnectionError:
            answer = None
        except ValueError as error:
            self._replace()
            raise InternalError(f"the grammar compiler sent an invalid message: {error}") from error
        if answer is None:
            raise self._exit_error()
        return answer

    def _exit_error(self) -> Exception:
        """Reap a child that has closed its connection, start the next, and return the error to raise."""
        assert self._process is not None
        process = self._process
        try:
            code = process.wait()
        except TimeoutError:
            return Unavailable("the grammar compiler closed its connection but does not exit")
        finally:
            stderr = process.stderr_tail(_STDERR_BYTES)
            was_ready = self._ready
            self._replace()
        if not was_ready:
            return Unavailable(f"the grammar compiler failed to start: {stderr.decode(errors='replace').strip()}")
        return _Died(-code, stderr)

    def _replace(self) -> None:
        """End the child and start the next at once, so that it is warm before the next source."""
        self.close()
        self.start()

    def _explain(self, death: _Died) -> str:
        if death.by_signal == signal.SIGPROF:
            return f"compiling the grammar takes more than {self._limits.cpu_s:g} s of CPU time, the limit"
        if any(sign in death.stderr for sign in _OUT_OF_MEMORY):
            return f"compiling the grammar takes more than {self._limits.memory_bytes // MIB} MB of memory, the limit"
        try:
            name = signal.Signals(death.by_signal).name
        except ValueError:
            name = f"exit status {-death.by_signal}"
        return f"compiling the grammar crashes the llguidance compiler ({name})"
