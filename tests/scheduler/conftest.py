"""A tiny model folder and the HTTP API over a scripted dispatcher."""

import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from flags.options import EngineOptions
from ranktable_tools.core_quota import usable_threads
from scheduler import side_threads
from scheduler.api import openapi
from scheduler.api.route_entry import Route
from scheduler.app import build_app
from scheduler.app_context import AppContext, ReadyReport
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.images.header_reader import HeaderReader
from scheduler.model.files import ModelFiles, read_model_files
from scheduler.model.generation_defaults import GUIDE_DEFAULTS
from scheduler.observability.metrics import Metrics
from scheduler.serving import open_images
from scheduler.templates.templates import TemplateRenderer
from scheduler.tokens import Tokens
from testing.scheduler.scripted_dispatcher import Line, Script, ScriptedDispatcher

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CORPUS = ["hello world", "the quick brown fox jumps over the lazy dog", "San Francisco is a city", "good morning"] * 20


@functools.cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    return tokenizer


def write_model(folder: Path, **tokenizer_config: Any) -> Path:
    """Write a model folder without weights: byte-level BPE, 512 positions, a ChatML template."""
    tokenizer = _tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "vocab_size": 384, "max_position_embeddings": 512, "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "is_matryoshka": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    own = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|endoftext|>"}, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(own | tokenizer_config))
    return folder


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Coroutine tests marked `anyio` run on asyncio alone."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def read_once() -> Iterator[None]:
    """Describe the routes that equal options open once, and count cores once: most of the time that an app takes."""
    describe, found = openapi.describe, dict[object, tuple[Sequence[Route], dict[str, Any]]]()

    def describe_once(routes: Sequence[Route], version: str, **rest: Any) -> dict[str, Any]:
        key = (*map(id, routes), *sorted(rest.items()))
        if key not in found:
            found[key] = routes, describe(routes, version, **rest)  # kept, so that no other route gets its id
        return found[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openapi, "describe", describe_once)
        patch.setattr(side_threads, "usable_threads", functools.cache(usable_threads))
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return write_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def files_of(model_folder: Path) -> Callable[[Path, str | None], ModelFiles]:
    """Return a function that reads a folder with a chat template, the tiny model's once."""
    of_tiny = functools.cache(lambda template: read_model_files(str(model_folder), chat_template=template))
    return lambda folder, template: (
        of_tiny(template) if folder == model_folder else read_model_files(str(folder), chat_template=template)
    )


@pytest.fixture(scope="session")
def tokens(model_folder: Path) -> Tokens:
    """The tiny model's tokens; tests that render a chat use `serve`, which stops the template process."""
    return Tokens(read_model_files(str(model_folder)))


class Served:
    """A client of the HTTP API, and the scripted dispatcher behind it."""

    def __init__(self, client: httpx.AsyncClient, context: AppContext, dispatcher: ScriptedDispatcher) -> None:
        self.client, self.context, self.dispatcher = client, context, dispatcher

    @property
    def model(self) -> str:
        """The model's name."""
        return self.context.config.engine.served_names()[0]

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of `text`."""
        return self.context.tokens._encode(text, add_special_tokens=False)


class KeptRenderer(TemplateRenderer):
    """Outlives the `Tokens` that use it."""

    async def close(self) -> None:
        """Do nothing."""


@pytest.fixture(scope="module")
async def one_renderer(anyio_backend: str) -> AsyncIterator[TemplateRenderer]:
    """One process for all chats of a module that uses this: starting it takes longer than most tests."""
    renderer = KeptRenderer()
    yield renderer
    await TemplateRenderer.close(renderer)


class KeptHeaderReader(HeaderReader):
    """Outlives the image loaders that use it."""

    async def close(self) -> None:
        """Do nothing."""


@pytest.fixture(scope="module")
async def one_header_reader(anyio_backend: str) -> AsyncIterator[HeaderReader]:
    """One process for the headers of all images of a module that uses this."""
    reader = KeptHeaderReader()
    yield reader
    await HeaderReader.close(reader)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Return `make_model(**tokenizer_config)`."""
    return lambda **tokenizer_config: write_model(tmp_path / "model", **tokenizer_config)


@pytest.fixture
def serve(
    model_folder: Path, files_of: Callable[[Path, str | None], ModelFiles], request: pytest.FixtureRequest
) -> Serve:
    """Return `serve(says, **options)`: `answer` is the answer of every sequence, a text or a Script."""

    @asynccontextmanager
    async def opened(
        answer: str | Script = "hello world", *, folder: Path = model_folder, readiness: ReadyReport | None = None,
        health: Callable[[], str | None] | None = None, names: tuple[str, ...] = (), maximum: int | None = None,
        defaults: Mapping[str, Any] = GUIDE_DEFAULTS, **options: Any,
    ) -> AsyncIterator[Served]:  # fmt: skip
        config = SchedulerConfig(EngineOptions(model=str(folder), served_model_name=names), SchedulerOptions(**options))
        tokens = Tokens(
            files_of(folder, config.options.chat_template),
            config.options.chat_settings(keyed=False),
            request.getfixturevalue("one_renderer") if "one_renderer" in request.fixturenames else None,
        )
        dispatcher = ScriptedDispatcher(answer if callable(answer) else _repeat(tokens, answer))
        report = readiness or ReadyReport(True)
        images = open_images(config.options, str(folder), tokens.files.vision)
        if images is not None and "one_header_reader" in request.fixturenames:
            images = replace(images, headers=request.getfixturevalue("one_header_reader"))
        context = AppContext(
            config,
            dispatcher,
            tokens,
            Metrics(),
            lambda: report,
            health or (lambda: None),
            lambda length, n: maximum,
            defaults=defaults,
            images=images,
        )
        transport = httpx.ASGITransport(build_app(context), raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                yield Served(client, context, dispatcher)
        finally:
            await tokens.close()
            if images is not None:
                await images.close()

    return opened


def _repeat(tokens: Tokens, text: str) -> Script:
    line = Line(tokens._encode(text, add_special_tokens=False))
    return lambda request, prompt, sequence: line
