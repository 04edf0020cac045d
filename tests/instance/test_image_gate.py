"""A prompt with images that is computed and decoded here waits in its session for its embeddings."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from engine.interface import Embeddings
from instance.session import InstanceSession
from tests.instance.session_runs import next_event, run_session
from wire.errors import InvalidRequest
from wire.messages import Cancel, Failed, Generate, Refused
from wire.types import PromptImage, PromptState, SamplingParams, StageTimes

_VALUES = (b"values",)
_STATE = PromptState(
    "p", "r", (1, 2, 3), SamplingParams(max_tokens=4), images=(PromptImage(0, 2, bytes(32), (1, 1, 2), b"file"),)
)


class _Halves:
    """The decode half, which records what it is given, and the future of the images."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, Sequence[Embeddings]]] = []
        self.cancelled: list[str] = []
        self.future: Future[tuple[Embeddings, ...]] = Future()
        self.decode = SimpleNamespace(generate=self._generate)

    def embed(self, images: Sequence[PromptImage]) -> "Future[tuple[Embeddings, ...]]":
        assert images == _STATE.images
        return self.future

    def cancel(self, owner: InstanceSession, command: Cancel) -> None:
        self.cancelled.append(command.prompt_id)

    def send_tokens(self, tokens: tuple[()], times: tuple[tuple[str, StageTimes], ...]) -> None:
        ((prompt_id, spent),) = times
        assert spent.encode_s is not None
        assert prompt_id == self.taken[-1][0]

    def _generate(
        self, owner: InstanceSession, state: PromptState, grammar: None, embeddings: Sequence[Embeddings] = ()
    ) -> None:
        self.taken.append((state.prompt_id, embeddings))


def _run(test: Callable[[InstanceSession, _Halves], Awaitable[None]], *, takes_images: bool = True) -> None:
    halves = _Halves()
    run_session(lambda session: test(session, halves), halves, embed=halves.embed if takes_images else None)


async def _settled(session: InstanceSession) -> None:
    while session._image_gate._waiting:  # noqa: ASYNC110 - no event reports it
        await asyncio.sleep(0)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_prompt_continues_with_its_embeddings(at_once: bool) -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        if at_once:
            halves.future.set_result(_VALUES)
        session.handle(Generate(_STATE))
        assert bool(halves.taken) == at_once
        if not at_once:
            halves.future.set_result(_VALUES)
        await _settled(session)

        assert halves.taken == [("p", _VALUES)]

    _run(test)


def test_an_image_that_cannot_be_embedded_refuses_its_prompt() -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        session.handle(Generate(_STATE))
        halves.future.set_exception(InvalidRequest("image 0: broken", "images"))

        assert await next_event(session) == Refused("p", "InvalidRequest", "image 0: broken", param="images")
        assert halves.taken == []

    _run(test)


def test_a_prompt_cancelled_while_it_waits_ends_once() -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        session.handle(Generate(_STATE))
        session.handle(Cancel("p", None, "enough"))

        assert await next_event(session) == Failed("p", "Cancelled", "enough")
        assert halves.future.cancelled()
        assert (halves.taken, halves.cancelled) == ([], [])

    _run(test)


def test_a_second_prompt_of_that_id_is_refused_meanwhile() -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        session.handle(Generate(_STATE))
        session.handle(Generate(_STATE))

        refused = await next_event(session)
        assert isinstance(refused, Refused)
        assert "already waiting for its images" in refused.message
        halves.future.set_result(_VALUES)
        await _settled(session)
        assert halves.taken == [("p", _VALUES)]

    _run(test)


def test_a_lost_session_passes_on_no_prompt() -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        session.handle(Generate(_STATE))
        session.lost()

        assert halves.future.cancelled()
        assert halves.taken == []

    _run(test)


def test_without_an_encoder_the_engine_refuses_the_images() -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        session.handle(Generate(_STATE))

        assert halves.taken == [("p", ())]

    _run(test, takes_images=False)
