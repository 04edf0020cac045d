"""Many prompts at once over a pair of real instances, as a scheduler would drive them; each finish is counted."""

import asyncio
import collections
import random
from dataclasses import dataclass, field

from tests.instance.pair import DEADLINE_S
from wire.connection import Session
from wire.errors import InstanceLost
from wire.load import LoadSnapshot
from wire.messages import Cancel, Event, Failed, HandedOff, Heartbeat, Prefill, Refused, Reserve, Reserved, Step
from wire.types import PromptState, SamplingParams

LONGEST_PROMPT, LONGEST_OUTPUT = 120, 30


@dataclass
class Line:
    """One session, its events by prompt, and the last load it reported."""

    session: Session
    load: LoadSnapshot | None = None
    inboxes: dict[str, asyncio.Queue[Event]] = field(default_factory=lambda: collections.defaultdict(asyncio.Queue))
    beat: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        """Sort the events until the session ends."""
        try:
            async for event in self.session.events():
                self._sort(event)
        except InstanceLost:
            return

    async def receive(self, prompt_id: str) -> Event:
        """Return the prompt's next event."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.inboxes[prompt_id].get()

    async def wait_empty(self) -> None:
        """Wait for a heartbeat that reports that no block is held."""
        async with asyncio.timeout(DEADLINE_S):
            while self.load is None or self.load.blocks_used:
                self.beat.clear()
                await self.session.send(Heartbeat())
                await self.beat.wait()

    def _sort(self, event: Event) -> None:
        match event:
            case Step():
                for prompt_id in {token.prompt_id for token in event.tokens}:
                    own = tuple(token for token in event.tokens if token.prompt_id == prompt_id)
                    self.inboxes[prompt_id].put_nowait(Step(own, event.load))
            case Reserved() | Refused() | HandedOff() | Failed():
                self.inboxes[event.prompt_id].put_nowait(event)
            case Heartbeat():
                self.load = event.load
                self.beat.set()


@dataclass
class Traffic:
    """Prompts numbered from `seed` on over one pair; about half are cancelled at a random moment."""

    prefill: Line
    decode: Line
    seed: int
    at_once: int = 16

    async def run(self, count: int) -> None:
        """Run `count` prompts to their end, which each side reports exactly once."""
        slots = asyncio.Semaphore(self.at_once)

        async def one(number: int) -> None:
            async with slots:
                await self._one(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(self.seed, self.seed + count):
                tasks.create_task(one(number))

    async def _one(self, number: int) -> None:
        rng = random.Random(number)
        token_ids = tuple(rng.randrange(3, 400) for _ in range(rng.randrange(1, LONGEST_PROMPT)))
        params = SamplingParams(rng.randrange(1, LONGEST_OUTPUT), temperature=0.0, n=rng.choice((1, 1, 2)))
        state = PromptState(f"{number}/0", str(number), token_ids, params)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self._serve(state))
            if rng.random() < 0.5:
                tasks.create_task(self._cancel(state.prompt_id, rng.randrange(60), running))

    async def _cancel(self, prompt_id: str, turns: int, running: asyncio.Task[None]) -> None:
        for _ in range(turns):  # of the event loop: the moment differs each time
            await asyncio.wait([running], timeout=0.001)
        for line in (self.prefill, self.decode):
            await line.session.send(Cancel(prompt_id))

    async def _serve(self, state: PromptState) -> None:
        prompt_id = state.prompt_id
        await self.decode.session.send(Reserve(state))
        reserved = await self.decode.receive(prompt_id)
        if not isinstance(reserved, Reserved):
            assert self.decode.inboxes.pop(prompt_id).empty(), f"{prompt_id} got an event after {reserved}"
            return
        await self.prefill.session.send(Prefill(state, reserved.ticket))
        ended = await self._listen(self.prefill, prompt_id, state.params.n, HandedOff)
        await self._listen(self.decode, prompt_id, state.params.n - ended)

    async def _listen(self, line: Line, prompt_id: str, sequences: int, *good: type) -> int:
        """Read one side's events to the end; return how many sequences finished there. None may finish twice."""
        ended = set[int]()
        while good or sequences == 0 or len(ended) < sequences:
            event = await line.receive(prompt_id)
            if isinstance(event, Step):
                finished = [token.sequence for token in event.tokens if token.finish is not None]
                assert not ended & set(finished), f"{prompt_id}: {finished} finished before"
                ended.update(finished)
            elif isinstance(event, (Failed, *good)):
                break
        assert line.inboxes.pop(prompt_id).empty(), f"{prompt_id} got an event after its end"
        return len(ended)
