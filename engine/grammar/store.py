"""The instance's grammars: compiled in the child, built and cached here, shared by all requests with the same grammar.

prepare --> known: a done future
        --> being compiled: the same future
        --> new: queue --> compiler thread: child compiles --> backend builds --> cache --> future
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.grammar.backend import make_backend
from engine.grammar.cache import OutcomeCache
from engine.grammar.compiling_child import CompilingChild
from engine.grammar.interface import Backend, Grammar
from engine.grammar.limits import GrammarLimits
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.source import GrammarSource, is_old_name, read_source
from engine.grammar.tokenizer_file import TokenizerFile
from telemetry.logs import EventLogger
from wire.errors import Draining, InternalError, InvalidGrammar, Overloaded, PdserveError
from wire.types import StructuredOutput

_log = EventLogger("grammar")
_CLOSE_WAIT_S = 30.0


@dataclass(slots=True)
class _Job:
    """A source to compile; its future cannot be cancelled, since several requests may share it."""

    source: GrammarSource
    expires_at: float
    future: "Future[Grammar]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()


class GrammarStore:
    """Compiles the grammars of requests on its own thread. `prepare` may be called from any thread.

    Use it as a context manager or call `close`. The constructor does not block: its thread loads the tokenizer and
    starts the child.
    """

    def __init__(
        self,
        tokenizer: TokenizerFile,
        limits: GrammarLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer, self._limits, self._clock = tokenizer, limits or GrammarLimits(), clock
        self._lock = threading.Lock()
        self._cache = OutcomeCache(self._limits.cache_bytes)
        self._jobs: dict[bytes, _Job] = {}
        self._queue: queue.Queue[_Job | None] = queue.Queue()
        self._closed = False
        self._logged_old_name = False
        self._warmed = threading.Event()
        self._loaded_backend: Backend | None = None
        self._child = CompilingChild(self._tokenizer, self._limits)
        self._thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
        self._thread.start()

    def prepare(self, option: StructuredOutput) -> "Future[Grammar]":
        """Return the future of the compiled grammar.

        Its error is InvalidGrammar, or a temporary one: Overloaded if too many grammars wait, DeadlineExceeded,
        Unavailable, or Draining after `close`.
        """
        try:
            source = read_source(option, self._limits)
        except InvalidGrammar as error:
            return _finished_future(error)
        self._log_old_name(option.backend)
        with self._lock:
            known = self._cache.find(source.key)
            if known is not None and not (isinstance(known, CompiledGrammar) and known.exhausted):
                return _finished_future(InvalidGrammar(known) if isinstance(known, str) else known)
            job = self._jobs.get(source.key)
            return self._enqueue(source) if job is None else job.future

    def wait_warm(self, timeout_s: float) -> bool:
        """Wait until the tokenizer is loaded, or found unsuitable for grammars; return False at the timeout.

        Loading it blocks every thread of the process, so a server waits for it before it starts serving.
        """
        return self._warmed.wait(timeout_s)

    def child_pid(self) -> int | None:
        """Return the compiling child's process id, None before the child is started."""
        return self._child.pid

    def close(self) -> None:
        """End the child and the thread; waiting sources are refused. Idempotent."""
        with self._lock:
            self._closed = True
        self._queue.put(None)
        self._thread.join(_CLOSE_WAIT_S)

    def __enter__(self) -> "GrammarStore":
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def _enqueue(self, source: GrammarSource) -> "Future[Grammar]":
        if self._closed:
            return _finished_future(Draining("this instance is shutting down"))
        if len(self._jobs) >= self._limits.queue_length:
            return _finished_future(Overloaded(f"{len(self._jobs)} grammars wait to be compiled, the limit"))
        job = self._jobs[source.key] = _Job(source, self._clock() + self._limits.wait_s)
        self._queue.put(job)
        return job.future

    def _log_old_name(self, backend: str) -> None:
        if is_old_name(backend) and not self._logged_old_name:
            self._logged_old_name = True
            _log.warning("guided_decoding_backend_served_by_llguidance", backend=backend)

    def _run(self) -> None:
        """Run the compiler thread. The child dies with this thread, which therefore runs until the store is closed."""
        try:
            self._load_backend()
            while (job := self._queue.get()) is not None and not self._closed:
                self._finish_job(job, self._compile_job(job))
        finally:
            self._child.close()
            with self._lock:
                self._closed = True
                left, self._jobs = list(self._jobs.values()), {}
            for job in left:
                job.future.set_exception(Draining("this instance is shutting down"))

    def _load_backend(self) -> None:
        try:
            self._get_backend()
            self._warmed.set()
            self._child.start()
        except (PdserveError, OSError) as error:
            _log.warning("structured_output_unavailable", error=error)
        finally:
            self._warmed.set()

    def _compile_job(self, job: _Job) -> CompiledGrammar | PdserveError:
        if self._clock() > job.expires_at:
            return Overloaded(f"the grammar waited {self._limits.wait_s:g} s to be compiled, the limit")
        try:
            backend = self._get_backend()  # if it is not installed, the refusal comes before a child starts
            compiled = self._child.compile(job.source)
            text = backend.build(compiled.form)
            return CompiledGrammar(text, self._tokenizer, job.source.kind, compiled.cost_bytes)
        except PdserveError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the outermost frame of a compile: answered and logged
            _log.error("grammar_compile_failed", error, error=error)
            return InternalError(f"compiling the grammar failed: {error}")

    def _finish_job(self, job: _Job, outcome: CompiledGrammar | PdserveError) -> None:
        with self._lock:
            del self._jobs[job.source.key]
            if isinstance(outcome, CompiledGrammar):
                self._cache.keep(job.source.key, outcome)
            elif isinstance(outcome, InvalidGrammar):
                self._cache.keep(job.source.key, str(outcome))
        if isinstance(outcome, PdserveError):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)

    def _get_backend(self) -> Backend:
        if self._loaded_backend is None:
            self._loaded_backend = make_backend(self._tokenizer, self._limits)
        return self._loaded_backend


def _finished_future(outcome: CompiledGrammar | PdserveError) -> "Future[Grammar]":
    future: Future[Grammar] = Future()
    if isinstance(outcome, PdserveError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future
