"""POST /rerank, /v1/rerank and /v2/rerank, the API of Jina and Cohere: documents sorted by their score for a query."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request

from scheduler.api.field_schemas import AnyDocuments
from scheduler.api.inputs import read_texts
from scheduler.api.pooled_response import PooledResponse
from scheduler.api.read_body import read_body
from scheduler.api.refusals import RERANK_NOT_SERVED, Refusal
from scheduler.api.scored_pairs import PairsBody, Scored, TextPairs, prepare_scores
from scheduler.app_context import AppContext
from wire.errors import InvalidRequest


class RerankBody(PairsBody):
    """The body of /rerank. `top_n` 0, or more than there are documents, returns all."""

    not_served: ClassVar[Mapping[str, Refusal]] = RERANK_NOT_SERVED

    query: str
    documents: AnyDocuments
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    return_documents: bool | None = None


async def create_rerank(context: AppContext, request: Request) -> PooledResponse:
    """Return the response that will run one request. Raises a PdserveError or HttpError if the request is invalid."""
    return await prepare_rerank(context, await read_body(context, request, RerankBody), request)


async def prepare_rerank(context: AppContext, body: RerankBody, request: Request) -> PooledResponse:
    """Tokenise and check a body."""
    documents = _read_documents(body.documents, context.config.options.max_inputs)
    query = read_texts(body.query, "query", max_inputs=1)

    def answer(scored: Scored) -> dict[str, Any]:
        best = sorted(enumerate(scored.scores), key=lambda scored: -scored[1])
        return {
            "id": scored.answer_id,
            "model": scored.model,
            "usage": {"prompt_tokens": scored.num_tokens, "total_tokens": scored.num_tokens},
            "results": [
                {"index": index, "relevance_score": score}
                | ({} if body.return_documents is False else {"document": {"text": documents[index]}})
                for index, score in best[: body.top_n or None]
            ],
        }

    pairs = TextPairs(query, documents, ("query", "documents"))
    return await prepare_scores(context, request, body, pairs, "rerank", answer)


def _read_documents(value: Any, maximum: int) -> tuple[str, ...]:
    """Return the texts of strings and of objects with `text`, given alone or as a list."""
    texts = []
    for index, one in enumerate((value if isinstance(value, list) else [value])[: maximum + 1]):
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str):
            path = f"documents.{index}" + (".text" if isinstance(one, dict) else "")
            other = "" if isinstance(one, dict) else ", or an object whose `text` is a string"
            raise InvalidRequest(f"{path} must be a string{other}", path)
        texts.append(text)
    return read_texts(texts, "documents", max_inputs=maximum)
