"""Prompts with images on the prefill half: queued with their embeddings, refused, or cancelled while they wait."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from engine.interface import Embeddings
from prefill_worker.worker import PrefillWorker
from testing.engine.fake_model import FakeConfig
from tests.engine.fake_engines import engine, prompt
from tests.prefill_worker.test_worker import STATS, Half, ticket_for
from wire.errors import InstanceLost, InvalidRequest
from wire.messages import Failed, HandedOff, Refused
from wire.types import PromptImage, PromptState

IMAGE = PromptImage(2, 4, bytes(32), (1, 1, 4), b"file")
VALUES = (bytes(4 * 2 * 4),)  # of four tokens, in the fake model of hidden size 2


def with_image(name: str) -> PromptState:
    return replace(prompt(name, 9), images=(IMAGE,))


@dataclass(eq=False)
class ImageHalf(Half):
    """A prefill half whose images are embedded when the test says so."""

    futures: list["Future[tuple[Embeddings, ...]]"] = field(default_factory=list)
    added: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = PrefillWorker(self.core, self.posted.append, self.posted.append, lambda: 0.0, self._embed)
        self.worker.use(self.sender)
        add = self.core.add

        def record(state: PromptState, **options: Any) -> None:
            self.added.append(options["embeddings"])
            add(state, **options)

        self.core.add = record  # type: ignore[method-assign]

    def _embed(self, images: Sequence[PromptImage]) -> "Future[tuple[Embeddings, ...]]":
        assert images == (IMAGE,)
        self.futures.append(Future())
        return self.futures[-1]


@contextmanager
def half() -> Iterator[ImageHalf]:
    with engine(FakeConfig(takes_images=True)) as (core, _):
        yield ImageHalf(core)
        assert (core.blocks.num_used, core.load().held_prompts) == (0, 0)


def test_a_prompt_is_queued_with_its_embeddings_while_others_run() -> None:
    with half() as it:
        it.worker.accept(it, with_image("p"), ticket_for(prompt("p", 9)))
        it.worker.accept(it, prompt("text", 9), ticket_for(prompt("text", 9), 2))
        it.turn_until_idle()
        assert {token.prompt_id for token in it.tokens} == {"text"}
        assert it.sender.messages[0] == ("begin", ticket_for(prompt("p", 9)).ticket_id), "its lease is renewed"

        it.futures[0].set_result(VALUES)
        it.turn_until_idle()

        assert {token.prompt_id for token in it.tokens} == {"text", "p"}
        assert it.added == [(), VALUES]
        for number in (1, 2):
            it.worker.cancel(it, {1: "p", 2: "text"}[number], "enough")
        it.turn_until_idle()


def test_an_image_that_cannot_be_embedded_refuses_its_prompt() -> None:
    with half() as it:
        it.worker.accept(it, with_image("p"), ticket_for(prompt("p", 9)))
        it.futures[0].set_exception(InvalidRequest("image 0: broken", "images"))
        it.turn_until_idle()

        assert it.events == [Refused("p", "InvalidRequest", "image 0: broken", param="images")]
        assert it.sender.messages[-1][0] == "abort"
        assert it.added == []


def test_a_cancelled_prompt_waits_for_no_embeddings() -> None:
    with half() as it:
        it.worker.accept(it, with_image("p"), ticket_for(prompt("p", 9)))
        it.worker.cancel(it, "p", "enough")
        it.turn_until_idle()

        assert it.futures[0].cancelled()
        assert it.events == [Failed("p", "Cancelled", "enough")]
        assert it.added == []


def test_a_link_that_fails_while_the_prompt_waits_ends_it_once() -> None:
    with half() as it:
        it.worker.accept(it, with_image("p"), ticket_for(prompt("p", 9)))
        it.worker.failed(ticket_for(prompt("p", 9)).ticket_id, InstanceLost("gone"))
        it.turn_until_idle()

        assert it.futures[0].cancelled()
        assert it.events == [Failed("p", "InstanceLost", "gone")]


def test_a_link_that_fails_at_once_leaves_no_image_waiting() -> None:
    with half() as it:
        it.sender.on_begin = lambda ticket: it.worker.failed(ticket.ticket_id, InstanceLost("nobody listens"))
        it.worker.accept(it, with_image("p"), ticket_for(prompt("p", 9)))
        it.turn_until_idle()

        assert it.futures[0].cancelled()
        assert it.events == [Failed("p", "InstanceLost", "nobody listens")]


def test_a_hand_off_keeps_no_embeddings_after_they_were_queued() -> None:
    with half() as it:
        it.worker.accept(it, with_image("p"), ticket_for(prompt("p", 9)))
        it.futures[0].set_result(VALUES)
        it.turn_until_idle()

        assert it.worker._hand_offs["p"].embeddings is None
        it.worker.acked(ticket_for(prompt("p", 9)).ticket_id, STATS)
        it.turn_until_idle()
        assert isinstance(it.events[-1], HandedOff)
