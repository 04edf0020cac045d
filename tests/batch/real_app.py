"""The scheduler's own app over a scripted dispatcher, without weights."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from flags.options import EngineOptions
from scheduler.app import build_app
from scheduler.app_context import AppContext, ReadyReport
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.model.files import read_model_files
from scheduler.observability.metrics import Metrics
from scheduler.serving import open_images
from scheduler.tokens import Tokens
from testing.scheduler.scripted_dispatcher import Line, ScriptedDispatcher

NAME = "tiny"


@asynccontextmanager
async def real_app(
    folder: Path, text: str = "hello world", **options: Any
) -> AsyncIterator[tuple[ASGIApp, ScriptedDispatcher]]:  # fmt: skip
    """Yield the app of the model in `folder`, served as NAME, and its cluster, which generates only `text`."""
    engine = EngineOptions(model=str(folder), served_model_name=(NAME,))
    tokens = Tokens(read_model_files(str(folder)))
    line = Line(tokens._encode(text, add_special_tokens=False))
    dispatcher = ScriptedDispatcher(lambda request, prompt, sequence: line)
    context = AppContext(
        SchedulerConfig(engine, SchedulerOptions(**options)),
        dispatcher,
        tokens,
        Metrics(),
        lambda: ReadyReport(True),
        lambda: None,
        lambda length, n: None,
        images=open_images(SchedulerOptions(**options), NAME, tokens.files.vision),
    )
    try:
        yield build_app(context), dispatcher
    finally:
        await tokens.close()
        if context.images is not None:
            await context.images.close()
