"""The HTTP API: the routes and their endpoints."""

from collections.abc import Awaitable, Callable
from typing import cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.api import docs_page, openapi
from scheduler.api.anthropic.create_message import count_tokens, create_message
from scheduler.api.anthropic.message_errors import ANTHROPIC_FORMAT
from scheduler.api.anthropic.messages_body import CountTokensBody, MessagesBody
from scheduler.api.chat import create_chat_completion
from scheduler.api.cohere_embed import CohereEmbedBody, create_cohere_embedding
from scheduler.api.completions import create_completion
from scheduler.api.cors import with_cors
from scheduler.api.dev_routes import reset_prefix_cache, server_info
from scheduler.api.embeddings import EmbeddingBody, create_embedding
from scheduler.api.gate import Gate
from scheduler.api.generate import GenerateBody, generate
from scheduler.api.generation_body import ChatBody, CompletionBody
from scheduler.api.health import health, metrics, ready
from scheduler.api.idempotent import create_once, has_idempotency_key
from scheduler.api.invocations import invoke
from scheduler.api.load_report import REQUEST_HEADER, report_of
from scheduler.api.models import list_models, retrieve_model
from scheduler.api.ops import load, own_version, ping, version
from scheduler.api.pooling import ClassifyBody, TaskBody, create_classification, create_pooling
from scheduler.api.rerank import RerankBody, create_rerank
from scheduler.api.responses.create_response import count_input_tokens, create_response
from scheduler.api.responses.responses_body import ResponsesBody
from scheduler.api.responses.stored_responses import (
    LIST_QUERY,
    RETRIEVE_QUERY,
    cancel_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from scheduler.api.route_entry import CLASSES, SCORES, TEXT, VECTORS, Route
from scheduler.api.score import ScoreBody, create_score
from scheduler.api.streams import KEPT, RESUME_QUERY, create_kept, end_stream, keeps_stream, resume_stream
from scheduler.api.token_generation import TokensBody, generate_tokens
from scheduler.api.tokenize import DetokenizeBody, TokenizeBody, detokenize, tokenize, tokenizer_info
from scheduler.app_context import AppContext
from scheduler.config import SchedulerOptions
from scheduler.http.header import header_of, whole_header
from scheduler.http.keys import OPEN_PATHS
from scheduler.request_class import CLASS_HEADER

Handler = Callable[[Request], Awaitable[Response]]
_STREAMED = ("application/json", "text/event-stream")
_CHAT = {"messages": [{"role": "user", "content": "hello"}]}
_PROMPT = {"prompt": "hello", "max_tokens": 4}
_INPUT = {"input": "hello"}
_QUERY = {"query": "hello", "documents": ["good morning", "hello"]}
_PAIR = {"text_1": "hello", "text_2": "good morning"}

OPENAI_ROUTES: tuple[Route, ...] = (
    Route("GET", "/v1/models", list_models, "models", "List the model names that requests may use"),
    Route("GET", "/v1/models/{name:path}", retrieve_model, "models", "Show one model name"),
    Route(
        "POST", "/v1/completions", create_completion, "text", "Continue one or several prompts",
        CompletionBody, TEXT, media_types=_STREAMED, required=("prompt",), queues=True, example=_PROMPT,
    ),
    Route(
        "POST", "/v1/chat/completions", create_chat_completion, "text", "Answer a conversation",
        ChatBody, TEXT, media_types=_STREAMED, required=("messages",), queues=True, example=_CHAT | {"max_tokens": 4},
    ),
    Route(
        "GET", "/v1/streams/{stream_id}", resume_stream, "text", "Continue a stream that was kept",
        media_types=("text/event-stream",), query=RESUME_QUERY,
    ),
    Route("DELETE", "/v1/streams/{stream_id}", end_stream, "text", "End a stream that was kept"),
    Route(
        "POST", "/v1/responses", create_response, "text", "Answer items, in the format of OpenAI's Responses API",
        ResponsesBody, TEXT, media_types=_STREAMED, required=("input",), queues=True,
        example=_INPUT | {"max_output_tokens": 4},
    ),
    Route(
        "POST", "/v1/responses/input_tokens", count_input_tokens, "tokenizer", "Count the tokens of a response's input",
        ResponsesBody, TEXT, required=("input",), example=_INPUT,
    ),
    Route(
        "GET", "/v1/responses/{response_id}", retrieve_response, "text", "Return a stored response",
        media_types=_STREAMED, query=RETRIEVE_QUERY,
    ),
    Route("DELETE", "/v1/responses/{response_id}", delete_response, "text", "Delete a stored response"),
    Route("POST", "/v1/responses/{response_id}/cancel", cancel_response, "text", "Cancel a response in the background"),
    Route(
        "GET", "/v1/responses/{response_id}/input_items", list_input_items, "text",
        "List the items that a stored response answers", query=LIST_QUERY,
    ),
    Route(
        "POST", "/v1/messages", create_message, "text", "Answer a conversation, in Anthropic's format",
        MessagesBody, TEXT, media_types=_STREAMED, required=("messages",), queues=True, api_format=ANTHROPIC_FORMAT,
        example=_CHAT | {"max_tokens": 4},
    ),
    Route(
        "POST", "/v1/messages/count_tokens", count_tokens, "tokenizer", "Count the tokens of a conversation",
        CountTokensBody, TEXT, required=("messages",), api_format=ANTHROPIC_FORMAT, example=_CHAT,
    ),
    Route(
        "POST", "/inference/v1/generate", generate_tokens, "text", "Continue token ids with token ids",
        TokensBody, TEXT, media_types=_STREAMED, queues=True,
        example={"token_ids": [7, 9], "sampling_params": {"max_tokens": 4}},
    ),
    Route(
        "POST", "/v1/embeddings", create_embedding, "vectors", "Compute a vector for each text", EmbeddingBody, VECTORS,
        queues=True, example=_INPUT,
    ),
    Route(
        "POST", "/v2/embed", create_cohere_embedding, "vectors", "Compute a vector for each text, in Cohere's format",
        CohereEmbedBody, VECTORS, queues=True, example={"texts": ["hello"]},
    ),
    Route(
        "POST", "/v1/score", create_score, "vectors", "Compute the similarity of two texts", ScoreBody, SCORES,
        queues=True, example=_PAIR,
    ),
    Route(
        "POST", "/score", create_score, "vectors", "The same as /v1/score", ScoreBody, SCORES,
        queues=True, example=_PAIR,
    ),
    *(
        Route(
            "POST", path, create_rerank, "vectors", "Sort documents by their score", RerankBody, SCORES,
            queues=True, example=_QUERY,
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Route(
        "POST", "/classify", create_classification, "vectors", "Compute the class of each text", ClassifyBody, CLASSES,
        queues=True, example=_INPUT,
    ),
    Route(
        "POST", "/pooling", create_pooling, "vectors", "Compute vectors or classes of texts or tokens", TaskBody,
        queues=True, example=_INPUT,
    ),
    Route(
        "POST", "/invocations", invoke, "text", "SageMaker's route: the fields of the body select the API",
        media_types=_STREAMED, queues=True, example=_PROMPT,
    ),
    Route(
        "POST", "/tokenize", tokenize, "tokenizer", "The token ids of a text or a conversation", TokenizeBody,
        example={"prompt": "hello"},
    ),
    Route(
        "POST", "/detokenize", detokenize, "tokenizer", "The text of token ids", DetokenizeBody,
        example={"tokens": [7, 9]},
    ),
    Route(
        "GET", "/tokenizer_info", tokenizer_info, "tokenizer", "The tokenizer's config",
        flag="enable_tokenizer_info_endpoint",
    ),
)  # fmt: skip
OLD_ROUTES: tuple[Route, ...] = (
    Route(
        "POST", "/generate", generate, "text", "Continue a prompt",
        GenerateBody, TEXT, media_types=("application/json", "text/plain"), required=("prompt",),
        queues=True, example=_PROMPT,
    ),
)  # fmt: skip
OPS_ROUTES: tuple[Route, ...] = (
    Route("GET", "/health", health, "operations", "Whether this process can work", says_no=True),
    Route("GET", "/ready", ready, "operations", "Whether a request would be served now", says_no=True),
    Route("GET POST", "/ping", ping, "operations", "The same as /health", says_no=True),
    Route("GET", "/load", load, "operations", "Number of running requests"),
    Route("GET", "/version", version, "operations", "The version of pdserve"),
    Route("GET", "/server_info", server_info, "operations", "Flags, variables and versions", flag="enable_dev_routes"),
    Route(
        "POST", "/reset_prefix_cache", reset_prefix_cache, "operations", "Ignore everything that is cached now",
        flag="enable_dev_routes",
    ),
    Route("GET", "/metrics", metrics, "operations", "All metrics, for Prometheus", media_types=("text/plain",)),
)  # fmt: skip


def build_app(context: AppContext) -> ASGIApp:
    """Return the ASGI app for `context`: the routes that its options enable, and their OpenAPI document."""
    options = context.config.options
    routes = open_routes(options, keyed=len(context.keys) > 0)
    router, handlers = APIRouter(redirect_slashes=False), dict[tuple[str, str], Handler]()
    for route in routes:
        handler = _handler_of(route, context)
        router.add_route(route.path, handler, methods=route.methods.split())
        if "{" not in route.path:
            handlers.update(((method, route.path), handler) for method in route.methods.split())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Route a request, by one lookup if its path is fixed. The gate answers errors."""
        handle = handlers.get((scope["method"], scope["path"]))
        if handle is None:
            scope["app"] = router  # so that it raises an HTTPException for a path or method without a route
            await router(scope, receive, send)
        else:
            response = await handle(Request(scope, receive, send))
            await response(scope, receive, send)

    labels = {route.path: route.path for route in routes}
    formats = {route.path: route.api_format for route in routes}
    without_id = () if options.enable_request_id_headers else OPEN_PATHS
    gate = Gate(app, context.metrics, labels, context.keys, options.root_path, formats, without_id)
    return with_cors(gate, options)


def open_routes(options: SchedulerOptions, *, keyed: bool = False) -> tuple[Route, ...]:
    """Return the served routes, those with the API's description last; with USE_OPENAI=0 the legacy API.

    `keyed`: clients need an API key.
    """
    served = OPENAI_ROUTES if options.use_openai == "1" else OLD_ROUTES
    routes = tuple(route for route in (*served, *OPS_ROUTES) if route.is_open(options))
    open_paths = OPEN_PATHS - {"/metrics"} if options.protect_metrics else OPEN_PATHS
    root_path = options.root_path.rstrip("/")
    document = openapi.describe(routes, own_version(), root_path=root_path, open_paths=open_paths if keyed else None)
    describing = (
        Route("GET", "/openapi.json", openapi.endpoint_of(document), "operations", "This API, as OpenAPI 3.1"),
        Route(
            "GET", "/docs", docs_page.endpoint_of(document), "operations", "This API, as a page",
            flag="enable_docs", media_types=("text/html",),
        ),
    )  # fmt: skip
    return (*routes, *(route for route in describing if route.is_open(options)))


def _handler_of(route: Route, context: AppContext) -> Handler:
    """Return the route's handler: starlette only calls the endpoint's response, which may be any ASGI app."""

    async def serve(request: Request) -> Response:
        route.check_model(context.tokens.files.kind)
        if route.queues:
            wanted = header_of(request.scope, REQUEST_HEADER)
            if wanted is not None and (view := context.metrics.view) is not None:
                request.scope["state"]["load_report"] = report_of(wanted, view)
            tenant = str(request.scope["state"].get("tenant", ""))
            request_class = context.class_of(tenant, whole_header(request.scope, CLASS_HEADER))
            request.scope["state"]["request_class"] = request_class
            context.dispatcher.check_room(tenant, request_class)
        if route.path in KEPT and context.claims is not None and has_idempotency_key(request):
            return cast("Response", await create_once(context, route.endpoint, request))
        if route.path in KEPT and keeps_stream(request):
            return cast("Response", await create_kept(context, route.endpoint, request))
        return cast("Response", await route.endpoint(context, request))

    return serve
