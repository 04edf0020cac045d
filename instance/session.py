"""One scheduler's session with this instance: passes its commands to the workers and their events back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from engine.grammar.interface import Grammar
from engine.interface import Embeddings
from instance.future_gate import FutureGate
from instance.grammar_gate import GrammarGate
from instance.workers import Workers
from native.ticker import run_time
from prefill_worker.worker import Embed
from telemetry.logs import EventLogger
from wire.errors import Cancelled, Draining, PdserveError, to_name
from wire.messages import (
    Adopt,
    Cancel,
    ClaimRun,
    Command,
    EndClaim,
    Event,
    Failed,
    Generate,
    Heartbeat,
    MeasureLink,
    OpenSession,
    Prefill,
    Refused,
    Reserve,
    SetRole,
)
from wire.types import PromptState, StageTimes

if TYPE_CHECKING:
    from engine.grammar.store import GrammarStore

_log = EventLogger("instance")


class InstanceSession:
    """Serves one session (ServedSession) and owns the prompts that it sent (EventSink).

    Runs on the event loop's thread; `emit` may be called from any thread.
    """

    def __init__(
        self, hello: OpenSession, workers: Workers, on_ended: Callable[["InstanceSession"], None],
        measure: "Callable[[InstanceSession, MeasureLink], None]", grammars: "GrammarStore | None" = None,
        draining: Callable[[], str | None] = lambda: None, embed: Embed | None = None,
        set_role: "Callable[[InstanceSession, SetRole], None]" = lambda *_: None,
    ) -> None:  # fmt: skip
        """`embed` is needed where the engine takes images."""
        self.hello = hello
        self._workers, self._on_ended, self._measure = workers, on_ended, measure
        self._draining, self._set_role = draining, set_role
        self._loop = loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._gate = GrammarGate(grammars, loop)
        self._embed, self._image_gate = embed, FutureGate[tuple[Embeddings, ...]]("its images", loop)
        self._last_heard = self._run_time()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the session ended."""
        return self._ended

    def silent_for(self) -> float:
        """Return the seconds since the scheduler's last message in which this process could run."""
        return self._run_time() - self._last_heard

    def emit(self, event: Event) -> None:
        """Queue an event for the scheduler, unless the session ended. Any thread; order is kept per thread."""
        if self._ended:
            return
        with contextlib.suppress(RuntimeError):  # the event loop has closed: the scheduler is disconnected
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    def handle(self, command: Command) -> None:
        """Execute one command."""
        self._last_heard = self._run_time()
        if self._ended:
            return
        match command:
            case Reserve():
                self._take(command.prompt, lambda grammar: self._workers.decode.reserve(self, command.prompt, grammar))
            case Prefill():
                accept = self._workers.prefill.accept
                self._take(command.prompt, lambda grammar: accept(self, command.prompt, command.ticket, grammar))
            case Generate():
                self._take(command.prompt, lambda grammar: self._generate(command.prompt, grammar))
            case Cancel():
                self._refuse_on_error(command.prompt_id, lambda: self._cancel(command))
            case Adopt():
                self._workers.adopt(self, command)
            case ClaimRun() | EndClaim():
                self._workers.claims.handle(self, command, self._loop.time())
            case MeasureLink():
                self._measure(self, command)
            case SetRole():
                self._set_role(self, command)
            case Heartbeat() | OpenSession():
                pass

    def refuse(self, prompt_id: str, error: PdserveError) -> None:
        """Emit Refused for a command that cannot be accepted."""
        self._last_heard = self._run_time()
        if not self._ended:
            self._emit_refused(prompt_id, error)

    async def events(self) -> AsyncIterator[list[Event]]:
        """Yield all events queued since the last yield, until the session has ended."""
        while (event := await self._queue.get()) is not None:
            events = [event]
            while not self._queue.empty() and (event := self._queue.get_nowait()) is not None:
                events.append(event)
            yield events
            if event is None:
                return

    def lost(self) -> None:
        """End the session and its work: the scheduler is gone. Streams may stay for a while (host.py)."""
        if not self._ended:
            self._ended = True
            self._gate.drop_all()
            self._image_gate.drop_all()
            self._on_ended(self)
            self._queue.put_nowait(None)

    def _run_time(self) -> float:
        return run_time(self._loop.time)

    def _take(self, state: PromptState, take: Callable[[Grammar | None], None]) -> None:
        """Pass a prompt to `take` once its grammar is compiled; refuse it while the instance drains."""
        why = self._draining()
        if why is not None:
            self._emit_refused(state.prompt_id, Draining(why))
            return

        def start(grammar: Grammar | None) -> None:
            self._refuse_on_error(state.prompt_id, lambda: take(grammar), state.request_id)

        def refuse(error: PdserveError) -> None:
            self._emit_refused(state.prompt_id, error)

        self._refuse_on_error(state.prompt_id, lambda: self._gate.submit(state, start, refuse), state.request_id)

    def _generate(self, state: PromptState, grammar: Grammar | None) -> None:
        """Pass a prompt to the decode half, which computes it here, once its images are embedded."""
        if not state.images or self._embed is None:  # without an encoder the engine refuses images
            self._workers.decode.generate(self, state, grammar)
            return
        self._image_gate.check_new(state.prompt_id)
        began = self._loop.time()

        def generate(embeddings: tuple[Embeddings, ...]) -> None:
            self._workers.decode.generate(self, state, grammar, embeddings)
            self._workers.send_tokens((), ((state.prompt_id, StageTimes(encode_s=self._loop.time() - began)),))

        def start(embeddings: tuple[Embeddings, ...]) -> None:
            self._refuse_on_error(state.prompt_id, lambda: generate(embeddings), state.request_id)

        def refuse(error: PdserveError) -> None:
            self._emit_refused(state.prompt_id, error)

        self._image_gate.submit(state.prompt_id, self._embed(state.images), start, refuse)

    def _cancel(self, command: Cancel) -> None:
        if self._gate.drop(command.prompt_id) or self._image_gate.drop(command.prompt_id):
            self.emit(Failed(command.prompt_id, Cancelled.__name__, command.reason))
        else:
            self._workers.cancel(self, command)

    def _refuse_on_error(self, prompt_id: str, accept: Callable[[], None], request_id: str = "") -> None:
        try:
            accept()
        except PdserveError as error:
            self._emit_refused(prompt_id, error)
        except Exception as error:  # noqa: BLE001 - the outermost frame of a command: the session must continue
            _log.error("command_failed", error, prompt_id=prompt_id, request_id=request_id)
            self.emit(Failed(prompt_id, to_name(error), "the instance failed to accept this prompt; see its log"))

    def _emit_refused(self, prompt_id: str, error: PdserveError) -> None:
        self.emit(Refused.with_error(prompt_id, error))
