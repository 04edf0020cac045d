"""POST /generate, with USE_OPENAI=0: the API of vLLM's first server (0.6: vllm/entrypoints/api_server.py).

    {"prompt": "Hello", "n": 2, "temperature": 0.8}   ->   {"text": ["Hello world", "Hello there"]}

A stream is a sequence of such objects, each with all the text so far, each terminated by a NUL byte.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import ConfigDict, Field
from starlette.requests import Request

from scheduler.api.answer_shape import CompleteChoice, PromptReport, Usage
from scheduler.api.completions import DEFAULT_MAX_TOKENS
from scheduler.api.field_schemas import AnyPrompt
from scheduler.api.generation import Generation
from scheduler.api.generation_body import GenerationBody
from scheduler.api.prepared_request import prepare_generation
from scheduler.api.prompts import encode_prompt, read_prompts
from scheduler.api.read_body import read_body
from scheduler.api.request_ids import new_id
from scheduler.api.sse import StreamFormat
from scheduler.app_context import AppContext
from scheduler.text.pieces import TextPiece


class GenerateBody(GenerationBody):
    """The body of /generate: a prompt and sampling parameters only; `model` is optional."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    prompt: AnyPrompt = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    detokenize: Literal[True] | None = None


async def generate(context: AppContext, request: Request) -> Generation:
    """Return the response that will run one request. Raises a PdserveError or HttpError if the request is invalid."""
    body, tokens = await read_body(context, request, GenerateBody, accepts_form=True), context.tokens
    context.model_named(body.model)
    bounded = body.truncate_prompt_tokens is None
    (given,) = read_prompts(body.prompt, max_prompts=1, max_model_len=tokens.max_model_len if bounded else None)
    add_special = body.add_special_tokens is not False
    ids = await encode_prompt(given, tokens, add_special_tokens=add_special, bounded=bounded)
    prepared = await prepare_generation(
        context, body, request, [ids], default_max_tokens=DEFAULT_MAX_TOKENS, param="prompt", continues_prompt=True
    )
    prompt = given if isinstance(given, str) else tokens.decode(given)
    return prepared.generation(new_id("gen"), TextsShape(prompt, prepared.options.n))


def _frame(body: Mapping[str, Any]) -> bytes:
    return orjson.dumps(body) + b"\0"


class TextsShape:
    """Builds objects with all texts so far, each after its prompt. Implements AnswerShape."""

    stream_format = StreamFormat(
        ((b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-cache")), _frame
    )  # fmt: skip

    def __init__(self, prompt: str, n: int) -> None:
        self._prompt = prompt
        self._texts = [prompt] * n

    def opening(self, index: int, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return b"": the stream has no opening event."""
        return b""

    def event(self, piece: TextPiece, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return a frame with all texts so far."""
        self._texts[piece.index] += piece.text
        return _frame({"text": self._texts})

    def logprobs(self, piece: TextPiece, prompt: PromptReport) -> None:
        """Return None: this API has no log probabilities."""

    def usage_chunk(self, usage: Usage) -> None:
        """Return None: this API has no token counts."""

    def whole(self, choices: list[CompleteChoice], prompts: Sequence[PromptReport], usage: Usage) -> dict[str, Any]:
        """Return the complete answer."""
        return {"text": [self._prompt + one.text for one in choices]}
