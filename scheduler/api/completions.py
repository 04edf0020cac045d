"""POST /v1/completions."""

from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request

from scheduler.api.answer_options import AnswerOptions
from scheduler.api.answer_shape import ANSWER_NULLS, CHOICE_NULLS, CompleteChoice, PromptReport, Usage
from scheduler.api.generation import Generation
from scheduler.api.generation_body import CompletionBody
from scheduler.api.images import image_prompt
from scheduler.api.logprobs import Scored, TokenFormatter, scored_output, scored_prompt
from scheduler.api.prepared_request import prepare_generation
from scheduler.api.prompts import encode_prompt, read_prompts
from scheduler.api.read_body import read_body
from scheduler.api.request_ids import created_at, new_id, shown_id
from scheduler.api.sampling import draw_seed
from scheduler.api.sse import SSE, event
from scheduler.api.text_offsets import TextOffsets
from scheduler.app_context import AppContext
from scheduler.text.pieces import TextPiece
from wire.errors import InvalidRequest
from wire.types import PromptImage

DEFAULT_MAX_TOKENS = 16


async def create_completion(context: AppContext, request: Request) -> Generation:
    """Return the response that will run one request. Raises a PdserveError or HttpError if the request is invalid."""
    return await prepare_completion(context, await read_body(context, request, CompletionBody), request)


async def prepare_completion(context: AppContext, body: CompletionBody, request: Request) -> Generation:
    """Tokenise and check a body."""
    model = context.model_named(body.model)
    if body.suffix:
        raise InvalidRequest("suffix is not currently supported: fill-in-the-middle is not implemented", "suffix")
    options, tokens = context.config.options, context.tokens
    bounded = body.truncate_prompt_tokens is None
    longest = tokens.max_model_len if bounded else None
    given = read_prompts(body.prompt, max_prompts=options.max_prompts, max_model_len=longest)
    add_special = body.add_special_tokens is not False
    images: tuple[PromptImage, ...] = ()
    if body.multi_modal_data is not None:
        made = await image_prompt(
            context, request, body.prompt, body.multi_modal_data, add_special_tokens=add_special, salt=body.cache_salt
        )
        prompts, images = [made.token_ids], made.images
    else:
        prompts = [await encode_prompt(one, tokens, add_special_tokens=add_special, bounded=bounded) for one in given]
    prepared = await prepare_generation(
        context, body, request, prompts, default_max_tokens=DEFAULT_MAX_TOKENS, param="prompt", continues_prompt=True,
        images=images,
    )  # fmt: skip
    echo: tuple[str, ...] = ()
    if body.echo:
        skips = body.skip_special_tokens is not False
        echo = tuple(
            one if isinstance(one, str) and bounded else tokens.decode(ids, skip_special_tokens=skips)
            for one, ids in zip(given, prepared.prompts, strict=True)
        )
    shares_seed = body.seed is not None or len(prompts) == 1
    seeds = () if shares_seed else tuple(draw_seed() for _ in prompts)  # with one seed equal prompts get equal answers
    request_id = new_id("cmpl")
    answer_id = shown_id(request_id, request, body.request_id)
    shape = CompletionShape(answer_id, model, prepared.formatter, prepared.options, echo, created=created_at(request))
    return prepared.generation(request_id, shape, echo=echo, seeds=seeds)


class CompletionShape:
    """Builds text_completion objects, complete ones and chunks."""

    stream_format = SSE

    def __init__(
        self, answer_id: str, model: str, formatter: TokenFormatter, options: AnswerOptions, echo: Sequence[str] = (),
        *, created: int,
    ) -> None:  # fmt: skip
        """`echo`: the text before each prompt's choices, empty if not requested."""
        self._head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._formatter, self._texts = formatter, formatter.texts
        self._options = options
        self._echo = echo
        self._is_plain = options.logprobs is None and not options.token_ids
        self._offsets: dict[int, TextOffsets] = {}
        self._opened: set[int] = set()
        self._before: dict[int, bytes] = {}

    def opening(self, index: int, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return b"": a completion's stream has no opening event."""
        return b""

    def event(self, piece: TextPiece, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return the event of a text chunk; in the common case by concatenating bytes."""
        if self._is_plain and usage is None and piece.finish_reason is None:
            before = self._before.get(piece.index) or self._event_prefix(piece.index)
            return before + orjson.dumps(piece.text) + _AFTER_TEXT
        is_first = piece.index not in self._opened
        self._opened.add(piece.index)
        logprobs, ids = self.logprobs(piece, prompt), tuple(token_id for token_id, _ in scored_output(piece.tokens))
        ended = CompleteChoice(piece.index, piece.text, piece.finish_reason, piece.stop_reason, logprobs, ids)
        chunk = {**self._head, "choices": [self._choice_object(ended, prompt, is_first=is_first)]}
        return event(chunk if usage is None else chunk | {"usage": usage})

    def logprobs(self, piece: TextPiece, prompt: PromptReport) -> dict[str, list[Any]] | None:
        """Return the log probabilities of a piece's tokens, after those of an echoed prompt; offsets are continuous."""
        if self._options.logprobs is None:
            return None
        echoed: list[Scored] = []
        if piece.index not in self._offsets:
            echo = self._echo[piece.index // self._options.n] if self._echo else ""
            self._offsets[piece.index] = TextOffsets(self._texts, echo, skips_special=self._options.skips_special)
            echoed = scored_prompt(prompt.token_ids, prompt.logprobs) if self._options.echoes_prompt else []
        offsets, scored = self._offsets[piece.index], scored_output(piece.tokens)
        begins = [
            *(offsets.of_prompt(token) for token, _ in echoed),
            *(offsets.of_output(token) for token, _ in scored),
        ]
        return self._formatter.completion(echoed + scored, begins)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the last chunk."""
        return self._head | {"choices": [], "usage": usage}

    def whole(self, choices: list[CompleteChoice], prompts: Sequence[PromptReport], usage: Usage) -> dict[str, Any]:
        """Return the complete answer."""
        answered = [
            _NULLS | self._choice_object(one, prompts[one.index // self._options.n], is_first=True) for one in choices
        ]
        return self._head | ANSWER_NULLS | {"choices": answered, "usage": usage}

    def _event_prefix(self, index: int) -> bytes:
        choice = b'"choices":[{"index":%d,"text":' % index
        self._before[index] = b"data: " + orjson.dumps(self._head)[:-1] + b"," + choice
        return self._before[index]

    def _choice_object(self, one: CompleteChoice, prompt: PromptReport, *, is_first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": one.index,
            "text": one.text,
            "logprobs": one.logprobs,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._options.prompt_logprobs is not None:
            formatter = TokenFormatter(self._texts, self._options.prompt_logprobs)
            choice["prompt_logprobs"] = formatter.prompt(scored_prompt(prompt.token_ids, prompt.logprobs))
        if self._options.token_ids:
            choice["token_ids"] = one.token_ids
            if is_first:
                choice["prompt_token_ids"] = list(prompt.token_ids)
        return choice


_NULLS = CHOICE_NULLS | {"prompt_logprobs": None, "prompt_token_ids": None}
_AFTER_TEXT = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
