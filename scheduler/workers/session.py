"""The session with a worker of another engine: each command about a prompt becomes HTTP requests, one per sequence.

PrefillAndHold    POST max_tokens 1, do_remote_decode   -> PrefillHeld(references) | Refused | Failed
                  the same, decode starts meanwhile     -> PrefillBegun(references), HandedOff | Refused | Failed
FetchAndGenerate  POST with the reference, streamed     -> Step | Refused | Failed
Generate          POST without a reference, streamed    -> Step | Refused | Failed
Reserve           POST with a callback URL, streamed    -> Reserved(body of the callback) | Refused | Failed
                  the same, after the callback          -> Step | Failed
Prefill           POST max_tokens 1, the callback body  -> HandedOff | Refused | Failed
Cancel            the connection is closed, which aborts the request on the worker
every second      GET /metrics                          -> Heartbeat(load)
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from scheduler.mailbox import Mailbox
from scheduler.workers.answers import SequenceStream
from scheduler.workers.engine_ids import EngineIds
from scheduler.workers.failure import failure_of
from scheduler.workers.http import WorkerHttp
from scheduler.workers.legs import (
    LEASE_S,
    WorkerRequest,
    asking,
    headers_of,
    new_request_id,
    ticket_of,
)
from scheduler.workers.load import WorkerLoad
from scheduler.workers.prefill_legs import PrefillLegs
from scheduler.workers.progress import Progress
from scheduler.workers.request_body import check_prompt, continued_ids, generate_body, path_of, unfinished
from scheduler.workers.transfers import HeldKv, Transfer
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire.description import InstanceDescription
from wire.errors import (
    DeadlineExceeded,
    HandoffFailed,
    Incompatible,
    InstanceLost,
    InternalError,
    NoCapacity,
    PdserveError,
)
from wire.load import LoadSnapshot
from wire.messages import (
    Cancel,
    Command,
    Event,
    FetchAndGenerate,
    Generate,
    Heartbeat,
    LinkMeasured,
    MeasureLink,
    Prefill,
    PrefillAndHold,
    Reserve,
    Reserved,
    SessionOpen,
    Step,
)
from wire.types import PromptState, TokenOutput

if TYPE_CHECKING:
    from scheduler.workers.callbacks import Callback, Expect

_log = EventLogger("workers")

_POLL_S = 1.0
_POLL_TIMEOUT_S = 60.0
"""A poll that takes longer ends the session; the silence before it is judged by scheduler/instances.py."""
_LOOK_S = 1.0
"""How long a prompt whose connection broke waits to learn whether its worker is gone."""


class WorkerSession:
    """One session with a worker. Implements wire.connection.Session."""

    def __init__(
        self, description: InstanceDescription, model: str, http: WorkerHttp,
        read_load: Callable[[float], Awaitable[WorkerLoad]], load: LoadSnapshot, expect: "Expect | None" = None,
        transfer: Transfer | None = None, engine_ids: EngineIds | None = None, address: str = "",
    ) -> None:  # fmt: skip
        """`http` is closed with the session; `read_load` takes a timeout in seconds, and raises a PdserveError.

        `expect` registers a callback of this worker, if decode workers get the first request; `transfer` is HeldKv by
        default. `engine_ids` has the ids of all workers; this worker's is registered by its `address`.
        """
        self._description = description
        self._model = model
        self._expect = expect
        self._http = http
        self._read_load = read_load
        self._progress = Progress(asyncio.get_running_loop().time)
        claim = (engine_ids or EngineIds()).claim
        self._prefill_legs = PrefillLegs(
            model, http, transfer or HeldKv(), self._progress, self._emit,
            max_abandoned_tokens=description.prefill_chunk_size,
            claim=lambda engine_id: claim(engine_id, address),
        )  # fmt: skip
        self._step: list[TokenOutput] = []
        self._events = Mailbox[Event | list[TokenOutput] | InstanceLost | None]()
        self._events.put(SessionOpen(description.instance_id, description.epoch, load))
        self._prompts: dict[str, asyncio.Task[None]] = {}
        self._sequences: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._poll_now, self._polled = asyncio.Event(), asyncio.Event()
        self._recomputed = CappedLog(_log)
        self._last_load: WorkerLoad | None = None
        self._polling = asyncio.create_task(self._poll())
        self._over = False

    async def send(self, *commands: Command) -> None:
        """Carry out the commands. Raises InstanceLost once the session has ended."""
        if self._over:
            raise InstanceLost(f"the session with {self._http.url} is over")
        for command in commands:
            self._handle(command)

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until the session ends. Raises InstanceLost when the worker is gone."""
        while True:
            for event in await self._events.take():
                if event is None:
                    return
                if isinstance(event, InstanceLost):
                    raise event
                if isinstance(event, list):
                    self._step, event = [], Step(tuple(event), None)
                yield event

    def look_now(self) -> None:
        """Read the load immediately: a connection broke, and the worker may be gone."""
        self._poll_now.set()

    async def close(self) -> None:
        """End the session, and with it all its requests on the worker."""
        self._over = True
        tasks = [self._polling, *self._prompts.values(), *self._prefill_legs.uncancelled]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._events.put(None)
        await self._http.close()

    def _handle(self, command: Command) -> None:
        match command:
            case PrefillAndHold(prompt=prompt):
                self._start(prompt, self._prefill_legs.hold(prompt))
            case FetchAndGenerate(prompt=prompt, references=references):
                self._start(prompt, self._generate(prompt, references))
            case Reserve(prompt=prompt):
                self._start(prompt, self._ask_and_generate(prompt))
            case Prefill(prompt=prompt, ticket=ticket):
                self._start(prompt, self._prefill_legs.send(prompt, ticket))
            case Generate(prompt=prompt):
                self._start(prompt, self._generate_here(prompt))
            case Cancel(prompt_id=prompt_id, sequence=sequence):
                task = self._prompts.get(prompt_id) if sequence is None else self._sequences.get((prompt_id, sequence))
                if task is not None:
                    task.cancel()
            case MeasureLink(peer_id=peer_id):
                self._emit(LinkMeasured(peer_id, None, "the links of other engines' workers are not measured"))

    def _start(self, prompt: PromptState, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._run(prompt, work))
        self._prompts[prompt.prompt_id] = task
        task.add_done_callback(lambda _: self._prompts.pop(prompt.prompt_id, None))

    async def _run(self, prompt: PromptState, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the task's outermost frame: a bug must end the prompt
            failure = failure_of(prompt, error)
            if failure.error == InstanceLost.__name__:
                await self._look()
            self._emit(failure)

    async def _generate_here(self, prompt: PromptState) -> None:
        """Generate without a hand-off; a stream has no log probabilities of the prompt, so these come first."""
        check_prompt(prompt)
        await self._prefill_legs.score(prompt)
        await self._generate(prompt, [WorkerRequest(new_request_id()) for _ in unfinished(prompt)])

    async def _ask_and_generate(self, prompt: PromptState) -> None:
        """Start the prompt on this worker; emit Reserved, with the blocks, once it has called back for all requests."""
        if self._expect is None:
            raise InternalError("with this --connector decode gets its request after prefill, so it cannot reserve")
        check_prompt(prompt)
        reserved = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            callbacks = [await stack.enter_async_context(self._expect()) for _ in unfinished(prompt)]
            requests = [asking(new_request_id(), callback.url) for callback in callbacks]
            tasks.create_task(self._reserve(prompt, requests, callbacks, reserved))
            await self._generate(prompt, requests, reserved)

    async def _reserve(
        self, prompt: PromptState, requests: Sequence[WorkerRequest], callbacks: "Sequence[Callback]",
        reserved: asyncio.Event,
    ) -> None:  # fmt: skip
        began = asyncio.get_running_loop().time()
        wanted = [
            WorkerRequest(request.request_id, await callback.wait())
            for request, callback in zip(requests, callbacks, strict=True)
        ]
        described = self._description
        ticket = ticket_of(prompt, described.instance_id, described.epoch, wanted, LEASE_S)
        self._emit(Reserved(prompt.prompt_id, ticket, asyncio.get_running_loop().time() - began))
        reserved.set()

    async def _generate(
        self, prompt: PromptState, requests: Sequence[WorkerRequest], reserved: asyncio.Event | None = None
    ) -> None:  # fmt: skip
        """Generate all sequences that need more tokens; with `reserved`, no token may come before that is set."""
        sequences = unfinished(prompt)
        if len(requests) != len(sequences):
            raise InternalError(f"the number of references is {len(requests)}, but that of sequences {len(sequences)}")
        if len(sequences) == 1:
            await self._generate_one(prompt, sequences[0], requests[0], reserved)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for sequence, request in zip(sequences, requests, strict=True):
                    work = self._generate_one(prompt, sequence, request, reserved)
                    self._sequences[prompt.prompt_id, sequence] = tasks.create_task(work)
        finally:
            for sequence in sequences:
                self._sequences.pop((prompt.prompt_id, sequence), None)

    async def _generate_one(
        self, prompt: PromptState, sequence: int, request: WorkerRequest, reserved: asyncio.Event | None
    ) -> None:  # fmt: skip
        body = generate_body(self._model, prompt, sequence, request.params)
        start = len(continued_ids(prompt, sequence)) - len(prompt.token_ids)
        stream = SequenceStream(prompt, sequence, start)
        waits = reserved is not None or request.is_early
        with self._progress.leg(
            0 if waits else len(prompt.token_ids), receives=waits, has_images=prompt.chat is not None and not waits,
            until=request.until, reserved=reserved,
        ) as leg:  # fmt: skip

            def take(data: bytes) -> None:
                leg.heard()
                tokens = stream.feed(data)
                if tokens and reserved is not None and not reserved.is_set():
                    raise HandoffFailed(
                        "it generated before it had requested the KV: does it run MooncakeLayerwiseConnector? "
                        "(--connector)"
                    )
                if stream.rendered_ids:
                    self._emit_rendered(prompt, stream.rendered_ids)
                    stream.rendered_ids = ()
                self._emit_tokens(tokens)

            await self._http.post_stream(path_of(prompt), body, headers_of(prompt, request.request_id), take)
        stream.end()
        if request.params and stream.was_recomputed:
            self._progress.prompts_recomputed += 1
            self._recomputed.warning(
                "prompt_recomputed", f"{self._http.url} computed a prompt although another worker held its KV",
                request_id=prompt.request_id, url=self._http.url, prompt_tokens=len(prompt.token_ids),
            )  # fmt: skip

    def _emit(self, event: Event) -> None:
        self._events.put(event)

    def _emit_rendered(self, prompt: PromptState, token_ids: tuple[int, ...]) -> None:
        """Emit the prompt's ids before any of its tokens, which then go into a later step."""
        self._emit(Step((), None, prompt_ids=((prompt.prompt_id, token_ids),)))
        self._step = []

    def _emit_tokens(self, tokens: list[TokenOutput]) -> None:
        """Add to the step that is not yet read, so that tokens arriving in one turn of the loop are one step."""
        if tokens and not self._step:
            self._events.put(self._step)
        self._step += tokens

    async def _look(self) -> None:
        """Wait until the load has been read again: the next attempt must not be placed on a worker that is gone."""
        next_polled = self._polled
        self.look_now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await next_polled.wait()

    async def _next_poll(self) -> None:
        """Wait for the next second, or until a connection broke: the worker may be gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._poll_now.wait()
        self._poll_now.clear()

    def _log_leases(self, load: WorkerLoad) -> None:
        """Log how often KV of this worker was held in vain, or read too late, since the last look."""
        last, self._last_load = self._last_load or load, load
        if late := load.read_late - last.read_late:
            reason = "decode workers read its KV after the lease: other prompts may have had the blocks"
            _log.warning("kv_read_late", url=self._http.url, count=late, reason=reason)
        if expired := load.expired - last.expired:
            _log.info("kv_expired", url=self._http.url, count=expired)

    async def _poll(self) -> None:
        """Emit the load each second; a broken connection, or an answer from another process, ends the session.

        An invalid answer is not reported: scheduler/instances.py judges the silence.
        """
        try:
            while True:
                await self._next_poll()
                polled, self._polled = self._polled, asyncio.Event()  # later callers wait for the next one
                try:
                    load = await self._read_load(_POLL_TIMEOUT_S)
                    polled.set()
                except (DeadlineExceeded, Incompatible, InternalError, NoCapacity) as error:
                    _log.debug("worker_without_load", url=self._http.url, error=error)
                    continue
                if load.snapshot.steps < self._progress.steps:
                    raise InstanceLost(f"{self._http.url} is now another process: its counters started again")
                self._log_leases(load)
                self._emit(Heartbeat(self._progress.judged(load.snapshot, load.num_fetching)))
        except PdserveError as error:
            self._over = True
            self._events.put(InstanceLost(str(error)))
            polled.set()
            self._polled.set()
