"""Image files in, the tokens of plain transformers out: on one instance, and over a hand-off in one process."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from flags.options import EngineOptions
from instance.config import InstanceConfig
from instance.local import LocalInstance
from tests.engine.tiny_vision_models import VISION
from tests.images.image_files import file_of, image_of
from tests.instance.image_prompts import ImageModel, make_image_model, without_files
from tests.instance.pair import Client, running
from wire.messages import Cancel, Event, Failed, Generate, HandedOff, Prefill, Refused, Reserve, Reserved, Step
from wire.types import PromptState, Role, TokenOutput

_FILES = [
    file_of(image_of(30, 20)),
    file_of(image_of(20, 33, seed=1), "JPEG"),
    file_of(image_of(41, 40, seed=2, mode="RGBA"), "WEBP"),
]
_BROKEN = _FILES[0][:70]


@pytest.fixture(scope="module", params=VISION)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    """Return a tiny model of each family."""
    return make_image_model(request.param, tmp_path_factory.mktemp("vision") / request.param)


def _prompts(model: ImageModel) -> list[PromptState]:
    """Return prompts with images first, between and last, next to each other, repeated, and none."""
    one, other, third = _FILES
    placed: list[dict[int, bytes]] = [{0: one}, {0: other}, {7: one, 9: third}, {20: one}, {3: other, 4: other}, {}]
    return [model.prompt(f"p{at}", range(30, 50), files) for at, files in enumerate(placed)]


def _config(model: ImageModel, role: Role, port: int, **options: Any) -> InstanceConfig:
    engine = EngineOptions(
        model=str(model.folder), dtype="float32", kv_cache_memory=8 << 20, port=port, device="cpu",
        **{"prefill_chunk_size": 13} | options,
    )  # fmt: skip
    return InstanceConfig(engine, role, device_ids=(str(port),))


@asynccontextmanager
async def _pair(model: ImageModel, **options: Any) -> AsyncIterator[tuple[Client, Client, LocalInstance]]:
    prefill, decode = (_config(model, role, port, **options) for role, port in ((Role.PREFILL, 4), (Role.DECODE, 6)))
    async with running(prefill) as (instance, p), running(decode) as (_, d):
        yield p, d, instance


async def _finish(client: Client, count: int, events: type = Step) -> dict[str, list[int]]:
    """Return the token ids by prompt of steps until `count` prompts have finished."""
    tokens = dict[str, list[int]]()
    while count:
        event = await client.next(events, Failed, Refused)
        assert isinstance(event, Step), event
        count -= sum(token.finish is not None for token in event.tokens)
        _take(tokens, event.tokens)
    return tokens


def _take(tokens: dict[str, list[int]], new: Sequence[TokenOutput]) -> None:
    for token in new:
        if token.token_id is not None:
            tokens.setdefault(token.prompt_id, []).append(token.token_id)


async def _hand_off(p: Client, d: Client, states: Sequence[PromptState]) -> dict[str, list[int]]:
    """Hand every prompt off, and return its tokens."""
    for state in states:
        await d.session.send(Reserve(without_files(state)))
        reserved = await d.next(Reserved, Refused)
        assert isinstance(reserved, Reserved), reserved
        await p.session.send(Prefill(state, reserved.ticket))
    tokens, left = dict[str, list[int]](), len(states)
    while left:
        event = await p.next(Step, HandedOff, Failed, Refused)
        assert isinstance(event, Step | HandedOff), event
        left -= isinstance(event, HandedOff)
        if isinstance(event, Step):
            _take(tokens, event.tokens)
    for name, ids in (await _finish(d, len(states))).items():
        tokens[name] += ids
    return tokens


def _encoder(instance: LocalInstance) -> Any:
    return instance._host._images


@pytest.mark.covers("A10.146")
@pytest.mark.long
def test_image_files_give_the_tokens_of_transformers_on_one_instance(model: ImageModel) -> None:
    states = _prompts(model)
    embedded = model.embedded(states[2], "embedded")

    async def run() -> dict[str, list[int]]:
        async with running(_config(model, Role.COMBINED, 4)) as (instance, client):
            for state in (embedded, *states):
                await client.session.send(Generate(state))
            answers = await _finish(client, 1 + len(states))
            load = instance._host.load()
            assert (load.images_encoded, load.images_waiting) == (len(_FILES), 0), "each file once"
            assert load.images_sought == sum(len(state.images) for state in states)
            return answers

    answers = asyncio.run(run())

    expected = {state.prompt_id: model.generate(state) for state in states}
    assert answers == expected | {"embedded": expected["p2"]}


@pytest.mark.covers("A10.146", "B.images.6")
@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_image_files_give_the_tokens_of_transformers_over_a_hand_off(model: ImageModel, transport: str) -> None:
    states = _prompts(model)

    async def run() -> dict[str, list[int]]:
        async with _pair(model, kv_transport=(transport,)) as (p, d, prefill):
            assert _encoder(prefill) is not None
            return await _hand_off(p, d, (model.embedded(states[2], "embedded"), *states))

    answers = asyncio.run(run())

    expected = {state.prompt_id: model.generate(state) for state in states}
    assert answers == expected | {"embedded": expected["p2"]}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    """Return a tiny LLaVA."""
    return make_image_model("llava", tmp_path_factory.mktemp("vision") / "llava")


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "killed encoder"])
def test_a_bad_image_ends_its_own_prompt_alone(llava: ImageModel, is_killed: bool) -> None:
    """A broken file, and one of another size than announced, beside a good prompt."""
    good, *others = (llava.prompt(name, range(30, 50), {3: _FILES[0]}) for name in ("good", "broken", "size", "after"))
    broken, size, after = others
    broken = replace(broken, images=(replace(broken.images[0], data=_BROKEN, digest=bytes(32)),))
    (image,) = size.images
    size = replace(size, images=(replace(image, count=15, grid=(1, 1, 15)),))
    after = llava.prompt("after", range(30, 50), {3: _FILES[1]})

    async def run() -> tuple[list[Event], dict[str, list[int]]]:
        async with _pair(llava) as (p, d, prefill):
            refused = []
            for state in (broken, size):
                await d.session.send(Reserve(without_files(state)))
                reserved = await d.next(Reserved)
                assert isinstance(reserved, Reserved)
                await p.session.send(Prefill(state, reserved.ticket))
                refused.append(await p.next(Refused, Failed, HandedOff))
                assert isinstance(await d.next(Failed), Failed), "the ticket is ended"
            tokens = await _hand_off(p, d, [good])
            if is_killed:
                os.kill(_encoder(prefill)._child.pid, signal.SIGKILL)
            return refused, tokens | await _hand_off(p, d, [after])

    refused, tokens = asyncio.run(run())

    assert [type(event) for event in refused] == [Refused, Refused]
    messages = [event.message for event in refused if isinstance(event, Refused)]
    assert "image 0: " in messages[0]
    assert "image 0 has 16 tokens in a grid of (1, 1, 16), but the prompt reserves 15" in messages[1]
    assert tokens == {state.prompt_id: llava.generate(state) for state in (good, after)}


@pytest.mark.long
def test_a_prompt_cancelled_while_its_image_is_encoded_holds_nothing(llava: ImageModel) -> None:
    """The encoder is stopped meanwhile, and text runs beside it."""
    image, text = llava.prompt("image", range(30, 50), {3: _FILES[0]}), llava.prompt("text", range(30, 50), {})

    async def run() -> dict[str, list[int]]:
        async with _pair(llava) as (p, d, prefill):
            pid = _encoder(prefill)._child.pid
            os.kill(pid, signal.SIGSTOP)
            await d.session.send(Reserve(without_files(image)))
            reserved = await d.next(Reserved)
            assert isinstance(reserved, Reserved)
            await p.session.send(Prefill(image, reserved.ticket))
            tokens = await _hand_off(p, d, [text])
            await p.session.send(Cancel("image", None, "enough"))
            assert await p.next(Failed) == Failed("image", "Cancelled", "enough")
            assert isinstance(await d.next(Failed), Failed)
            os.kill(pid, signal.SIGCONT)
            return tokens | await _hand_off(p, d, [replace(image, prompt_id="again")])

    tokens = asyncio.run(run())

    assert tokens == {"text": llava.generate(text), "again": llava.generate(image)}
