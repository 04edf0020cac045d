"""A stream that this scheduler has adopted, until its request runs: scheduler/stream_finder.py finds it."""

import asyncio
from dataclasses import replace

from scheduler.instances import Instance
from scheduler.prompt_on_instance import PromptEvent, PromptOnInstance, PromptStep
from wire.messages import Adopted
from wire.types import TokenOutput

_AT_ONCE = 256
"""Tokens replayed in one turn of the event loop: a long stream must not hold up the others."""


class Adoption:
    """A stream that is ours now, but has no request yet: keeps what its instance sends. Implements PromptOwner.

    It is released if no request takes it within `orphan_s`. Earlier owners have counted its first `num_counted` tokens.
    """

    def __init__(self, instance: Instance, adopted: Adopted, orphan_s: float) -> None:
        prompt = adopted.prompt
        assert prompt.stream is not None
        self.instance, self.prompt, self.stream = instance, prompt, prompt.stream
        self.num_counted = sum(map(len, prompt.outputs)) + adopted.num_sent
        self._steps: list[PromptStep] = []
        self._events: list[PromptEvent] = []
        self._on_instance = PromptOnInstance(
            prompt.prompt_id, self, instance.post, owner_epoch=self.stream.owner_epoch, close=instance.detach
        )
        instance.attach(self._on_instance)
        self._timer = asyncio.get_running_loop().call_later(orphan_s, self.release)

    def on_step(self, on_instance: PromptOnInstance, step: PromptStep) -> None:
        """Keep a step."""
        self._steps.append(step)

    def on_event(self, on_instance: PromptOnInstance, event: PromptEvent) -> None:
        """Keep an event."""
        self._events.append(event)

    async def hand_over(self, on_instance: PromptOnInstance) -> None:
        """Pass the outputs so far, and what was kept, to the owner that has taken this one's place."""
        self._timer.cancel()
        self._on_instance.ended = True
        prompt_id, outputs = self.prompt.prompt_id, enumerate(self.prompt.outputs)
        before = [TokenOutput(prompt_id, i, at, id_) for i, output in outputs for at, id_ in enumerate(output)]
        for step in (PromptStep(prompt_id, before), *self._steps):
            for at in range(0, len(step.tokens) or 1, _AT_ONCE):
                on_instance.owner.on_step(on_instance, replace(step, tokens=step.tokens[at : at + _AT_ONCE]))
                await asyncio.sleep(0)
        for event in self._events:
            on_instance.on_event(event)

    def release(self) -> None:
        """End the stream, unless it was handed over."""
        self._timer.cancel()
        self.instance.detach(self._on_instance)
