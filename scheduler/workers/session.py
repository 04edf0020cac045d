"""The session with a worker of another engine: each command about a prompt becomes HTTP requests, one a sequence.

PrefillAndHold    POST max_tokens 1, do_remote_decode   -> PrefillHeld(references) | Refused | Failed
FetchAndGenerate  POST with the reference, streamed     -> Step | Refused | Failed
Generate          POST without, streamed                -> Step | Refused | Failed
Cancel            the connection is closed, which aborts the request there
each second       GET /metrics                          -> Heartbeat(load)
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import orjson

from scheduler.workers.answers import SequenceStream, cached_tokens, kv_transfer_params, prompt_logprobs
from scheduler.workers.http import WorkerHttp
from scheduler.workers.progress import Progress
from scheduler.workers.request_body import check_prompt, continued_ids, generate_body, prefill_body
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire.errors import (
    DeadlineExceeded,
    HandoffFailed,
    Incompatible,
    InstanceLost,
    InternalError,
    InvalidRequest,
    NoCapacity,
    PdserveError,
    Unavailable,
)
from wire.load import LoadSnapshot
from wire.messages import (
    Cancel,
    Command,
    Event,
    Failed,
    FetchAndGenerate,
    Generate,
    Heartbeat,
    LinkMeasured,
    MeasureLink,
    Prefill,
    PrefillAndHold,
    PrefillHeld,
    Refused,
    Reserve,
    SessionOpen,
    Step,
)
from wire.types import InstanceDescription, PromptState, StageTimes, TokenOutput

_log = EventLogger("workers")

_COMPLETIONS = "/v1/completions"
_POLL_S = 1.0
_POLL_TIMEOUT_S = 60.0
"""A poll that takes longer ends the session; the silence before it is judged by scheduler/instances.py."""
LEASE_S = 20.0
"""For how long a reference may be used: vLLM holds the KV for 30 s, less what a slow machine needs to request it."""


class WorkerSession:
    """One session with a worker. Implements wire.connection.Session."""

    def __init__(
        self, description: InstanceDescription, model: str, http: WorkerHttp,
        read_load: Callable[[float], Awaitable[LoadSnapshot]], load: LoadSnapshot,
    ) -> None:  # fmt: skip
        """`http` is closed with the session; `read_load` takes the seconds it may last, and raises a PdserveError."""
        self._model = model
        self._http = http
        self._read_load = read_load
        self._progress = Progress(asyncio.get_running_loop().time)
        self._step: list[TokenOutput] = []
        self._events: asyncio.Queue[Event | list[TokenOutput] | InstanceLost | None] = asyncio.Queue()
        self._events.put_nowait(SessionOpen(description.instance_id, description.epoch, load))
        self._prompts: dict[str, asyncio.Task[None]] = {}
        self._sequences: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._poll_now = asyncio.Event()
        self._recomputed = CappedLog(_log)
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
        while (event := await self._events.get()) is not None:
            if isinstance(event, InstanceLost):
                raise event
            if isinstance(event, list):
                self._step, event = [], Step(tuple(event), None)
            yield event

    async def close(self) -> None:
        """End the session, and with it all its requests on the worker."""
        self._over = True
        tasks = [self._polling, *self._prompts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._events.put_nowait(None)
        await self._http.close()

    def _handle(self, command: Command) -> None:
        match command:
            case PrefillAndHold(prompt=prompt):
                self._start(prompt, self._prefill(prompt))
            case FetchAndGenerate(prompt=prompt, references=references):
                self._start(prompt, self._generate(prompt, references))
            case Generate(prompt=prompt):
                self._start(prompt, self._generate_here(prompt))
            case Cancel(prompt_id=prompt_id, sequence=sequence):
                task = self._prompts.get(prompt_id) if sequence is None else self._sequences.get((prompt_id, sequence))
                if task is not None:
                    task.cancel()
            case MeasureLink(peer_id=peer_id):
                self._emit(LinkMeasured(peer_id, None, "the links of other engines' workers are not measured"))
            case Reserve(prompt=prompt) | Prefill(prompt=prompt):
                message = f"a worker of another engine cannot {type(command).__name__.lower()}"
                self._emit(Refused(prompt.prompt_id, InternalError.__name__, message))

    def _start(self, prompt: PromptState, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._run(prompt, work))
        self._prompts[prompt.prompt_id] = task
        task.add_done_callback(lambda _: self._prompts.pop(prompt.prompt_id, None))

    async def _run(self, prompt: PromptState, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the task's outermost frame: a bug must end the prompt
            self._emit(self._failure(prompt, error))

    def _failure(self, prompt: PromptState, error: Exception) -> Refused | Failed:
        """Return the event for what ended a prompt: all but a wrong request and a full worker is tried elsewhere."""
        prompt_id = prompt.prompt_id
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        match error:
            case InvalidRequest() | NoCapacity():
                return Refused(prompt_id, type(error).__name__, str(error))
            case HandoffFailed():
                return Failed(prompt_id, HandoffFailed.__name__, str(error))
            case Unavailable():
                self._poll_now.set()
                return Failed(prompt_id, InstanceLost.__name__, str(error))
            case PdserveError():
                return Failed(prompt_id, InternalError.__name__, str(error))
        _log.error("worker_prompt_failed", error, request_id=prompt.request_id, prompt_id=prompt_id)
        return Failed(prompt_id, InternalError.__name__, f"internal error: {error!r}")

    async def _prefill(self, prompt: PromptState) -> None:
        """Compute the prompt once for each sequence that needs more tokens; all but the first find it cached."""
        check_prompt(prompt)
        began = asyncio.get_running_loop().time()
        references, cached = [], 0
        for number, sequence in enumerate(_unfinished(prompt)):
            request_id = secrets.token_hex(16)
            body = prefill_body(self._model, prompt, sequence)
            answer = await self._post(body, request_id, 0 if number else len(prompt.token_ids))
            if number == 0:
                cached = cached_tokens(answer)
                self._emit_scores(answer, prompt)
            references.append(orjson.dumps([request_id, kv_transfer_params(answer)]))
        times = StageTimes(prefill_s=asyncio.get_running_loop().time() - began, cached_tokens=cached)
        self._emit(PrefillHeld(prompt.prompt_id, tuple(references), LEASE_S, times))

    async def _post(self, body: bytes, request_id: str, num_tokens: int) -> dict[str, Any]:
        async with self._progress.leg(num_tokens) as leg:
            answer = await self._http.post_json(_COMPLETIONS, body, {"X-Request-Id": request_id})
            leg.heard(cached_tokens(answer))
            return answer

    def _emit_scores(self, answer: dict[str, Any], prompt: PromptState) -> None:
        scored = prompt_logprobs(answer, prompt)
        if scored is not None:
            self._emit(Step((), None, prompt_logprobs=(scored,)))

    async def _generate_here(self, prompt: PromptState) -> None:
        """Generate without a hand-off; a stream has no log probabilities of the prompt, so these come first."""
        check_prompt(prompt)
        if prompt.params.prompt_logprobs is not None and not prompt.outputs:
            body = prefill_body(self._model, prompt, 0, hold=False)
            self._emit_scores(await self._post(body, secrets.token_hex(16), len(prompt.token_ids)), prompt)
        await self._generate(prompt, ())

    async def _generate(self, prompt: PromptState, references: tuple[bytes, ...]) -> None:
        sequences = _unfinished(prompt)
        if references and len(references) != len(sequences):
            raise InternalError(f"{len(references)} references for {len(sequences)} sequences")
        if len(sequences) == 1:
            await self._generate_one(prompt, sequences[0], references[0] if references else None)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, sequence in enumerate(sequences):
                    work = self._generate_one(prompt, sequence, references[number] if references else None)
                    self._sequences[prompt.prompt_id, sequence] = tasks.create_task(work)
        finally:
            for sequence in sequences:
                self._sequences.pop((prompt.prompt_id, sequence), None)

    async def _generate_one(self, prompt: PromptState, sequence: int, reference: bytes | None) -> None:
        request_id, fetched = orjson.loads(reference) if reference else (secrets.token_hex(16), None)
        body = generate_body(self._model, prompt, sequence, fetched)
        start = len(continued_ids(prompt, sequence)) - len(prompt.token_ids)
        stream = SequenceStream(prompt, sequence, start)
        async with self._progress.leg(len(prompt.token_ids)) as leg:

            def take(data: bytes) -> None:
                leg.heard()
                self._emit_tokens(stream.feed(data))

            await self._http.post_stream(_COMPLETIONS, body, {"X-Request-Id": request_id}, take)
        stream.end()
        if reference and stream.was_recomputed:
            self._progress.prompts_recomputed += 1
            self._recomputed.warning(
                "prompt_recomputed", f"{self._http.url} computed a prompt although its KV was held for it",
                request_id=prompt.request_id, url=self._http.url, prompt_tokens=len(prompt.token_ids),
            )  # fmt: skip

    def _emit(self, event: Event) -> None:
        self._events.put_nowait(event)

    def _emit_tokens(self, tokens: list[TokenOutput]) -> None:
        """Add to the step that waits to be read: the tokens that arrive in one turn of the loop are one step."""
        if tokens and not self._step:
            self._events.put_nowait(self._step)
        self._step += tokens

    async def _next_poll(self) -> None:
        """Wait for the next second, or until a connection broke: the worker may be gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._poll_now.wait()
        self._poll_now.clear()

    async def _poll(self) -> None:
        """Report the load each second; a broken connection, or another process that answers, ends the session.

        An answer that is no load is not reported: scheduler/instances.py judges the silence.
        """
        try:
            while True:
                await self._next_poll()
                try:
                    load = await self._read_load(_POLL_TIMEOUT_S)
                except (DeadlineExceeded, Incompatible, InternalError, NoCapacity) as error:
                    _log.debug("worker_without_load", url=self._http.url, error=error)
                    continue
                if load.steps < self._progress.steps:
                    raise InstanceLost(f"{self._http.url} is another process: its counters started again")
                self._emit(Heartbeat(self._progress.judged(load)))
        except PdserveError as error:
            self._over = True
            self._events.put_nowait(InstanceLost(str(error)))


def _unfinished(prompt: PromptState) -> list[int]:
    """Return the sequences that need more tokens."""
    params, outputs = prompt.params, prompt.outputs or ((),) * prompt.params.num_sequences
    return [
        sequence
        for sequence, output in enumerate(outputs)
        if len(output) < params.max_tokens
        and not (output and output[-1] in params.stop_token_ids and len(output) > params.min_tokens)
    ]
