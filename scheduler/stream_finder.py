"""Adopt streams: those of another scheduler that a client resumes, and our own after a lost session.

client's GET --Adopt--> every instance --Adopted--> Adoption --hand_over--> PromptRun
lost session --Adopt(our epoch)--> the instance, once it is back --Adopted--> Adoption, as above
                                                                 --StreamMoved--> our client's stream is ended
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from scheduler.adoption import Adoption
from scheduler.instances import Instance
from scheduler.limits import ControlLimits
from scheduler.prompt_on_instance import PromptEvent, PromptOnInstance, PromptStep
from scheduler.prompt_run import PromptRun
from scheduler.registry import Registry
from telemetry.logs import EventLogger
from wire.errors import StreamMoved, Unavailable, UnknownStream, from_name
from wire.messages import Adopt, Adopted, Refused

_log = EventLogger("adoption")

_ARRIVING_POLL_S = 0.02
_OTHERS_S = 0.2
"""How long to wait for other copies of a stream that was found: those of attempts that its scheduler has given up."""


class _Answers:
    """The answers to Adopt of several instances. Implements PromptOwner under the stream's id."""

    def __init__(self, stream_id: str, orphan_s: float) -> None:
        self.adopted: list[Adoption] = []
        self.refused: list[Refused] = []
        self._stream_id, self._orphan_s = stream_id, orphan_s
        self._open: dict[PromptOnInstance, Instance] = {}
        self._answered = asyncio.Event()

    @property
    def is_arriving(self) -> bool:
        """Whether an instance waits for the KV of the stream."""
        return any(refused.error == Unavailable.__name__ for refused in self.refused)

    def ask(self, instance: Instance, command: Adopt) -> PromptOnInstance:
        on_instance = PromptOnInstance(self._stream_id, self, instance.post, close=instance.detach)
        self._open[on_instance] = instance
        instance.attach(on_instance)
        on_instance.post(command)
        return on_instance

    def on_step(self, on_instance: PromptOnInstance, step: PromptStep) -> None:
        """Do nothing: steps carry the prompt's id, not the stream's."""

    def on_event(self, on_instance: PromptOnInstance, event: PromptEvent) -> None:
        """Take an answer; the steps of an adopted stream follow it."""
        instance = self._open.pop(on_instance, None)
        if instance is not None and isinstance(event, Adopted):
            self.adopted.append(Adoption(instance, event, self._orphan_s))
        elif isinstance(event, Refused):
            self.refused.append(event)
        self._answered.set()

    async def wait(self, seconds: float) -> None:
        """Return when all have answered, after `seconds`, or `_OTHERS_S` after an instance adopted the stream."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        try:
            async with asyncio.timeout_at(deadline) as limit:
                while self._open:
                    await self._answered.wait()
                    self._answered.clear()
                    if self.adopted:
                        deadline = min(deadline, clock() + _OTHERS_S)
                        limit.reschedule(deadline)
        except TimeoutError:
            return


class StreamFinder:
    """Finds streams on the registry's instances and adopts them."""

    def __init__(self, registry: Registry, limits: ControlLimits) -> None:
        self._registry, self._limits = registry, limits
        self._asking: set[str] = set()

    async def adopt(self, stream_id: str, tenant: str) -> Adoption:
        """Adopt a stream for a client with this key, whichever scheduler owns it.

        Raises UnknownStream, or Unavailable if an instance that may have it cannot be reached.
        """
        with self._one_at_a_time(stream_id):
            answers = await self._ask_all(Adopt(stream_id, tenant))
        *others, newest = sorted(answers.adopted, key=lambda one: one.stream.owner_epoch)
        for other in others:  # of an attempt that its scheduler has given up
            other.release()
        _log.info("stream_adopted", request_id=newest.prompt.request_id, instance=newest.instance)
        return newest

    async def reclaim(self, prompt: PromptRun) -> Adoption | None:
        """Adopt a stream again after its session was lost while decoding; None: it must be generated elsewhere.

        Raises StreamMoved if it is no longer ours.
        """
        stream, place = prompt.state.stream, prompt.decoded_on
        if stream is None or place is None:
            return None
        index, process_epoch = place
        prompt.enter("waiting for the instance that decodes it")
        instance = await self._registry.wait_back(index, self._limits.settle_s)
        if instance is None or instance.description.epoch != process_epoch:
            return None
        with self._one_at_a_time(stream.stream_id):
            answers = await self._ask([instance], Adopt(stream.stream_id, stream.tenant, stream.owner_epoch))
        if answers.adopted:
            _log.info("stream_reclaimed", request_id=prompt.request.request_id, instance=instance)
            return answers.adopted[0]
        for refused in answers.refused:
            error = from_name(refused.error, refused.message)
            if isinstance(error, StreamMoved | UnknownStream):  # it has ended there, perhaps by another scheduler
                raise StreamMoved(f"{instance}: this scheduler's session was lost, and the stream is no longer its own")
        return None

    @contextmanager
    def _one_at_a_time(self, stream_id: str) -> Iterator[None]:
        if stream_id in self._asking:
            raise Unavailable("another request is resuming this stream: retry")
        self._asking.add(stream_id)
        try:
            yield
        finally:
            self._asking.discard(stream_id)

    async def _ask_all(self, command: Adopt) -> _Answers:
        """Ask all instances, again while the stream is on its way to one."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._limits.settle_s
        while not (answers := await self._ask(self._registry.living(), command)).adopted:
            if not answers.is_arriving:
                self._raise_unknown(len(answers.refused))
            if clock() >= deadline:
                raise Unavailable("the stream is still being handed off: retry")
            await asyncio.sleep(_ARRIVING_POLL_S)
        return answers

    async def _ask(self, instances: Sequence[Instance], command: Adopt) -> _Answers:
        answers = _Answers(command.stream_id, self._limits.orphan_s)
        with ExitStack() as asked:
            for instance in instances:
                if instance.description.worker is None:
                    asked.enter_context(answers.ask(instance, command))
            await answers.wait(self._limits.settle_s)
        return answers

    def _raise_unknown(self, num_answers: int) -> NoReturn:
        num_instances = sum(not member.expected.is_worker for member in self._registry.members)
        if num_answers < num_instances:
            counts = f"{num_answers} of {num_instances} instances have answered"
            raise Unavailable(f"{counts}, but none of them has this stream: retry")
        raise UnknownStream("no such stream: it was never resumable, has ended, or belongs to another API key")
