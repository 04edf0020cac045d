"""vLLM's 0.5 and 0.6 flags of the HTTP server."""

from typing import Final

from pdserve.flags.row import Arity, VllmFlag, no_effect, refused, supported

_NOTHING = Arity.NOTHING
_KEY = "or set PDSERVE_API_KEY, VLLM_API_KEY or --api-key-file"
_CORS = "a JSON list; without --allowed-origins, pages of other origins are refused"
_LOGS = "prompts are never logged"

SERVER_ROWS: Final[tuple[VllmFlag, ...]] = (
    supported("--host"),
    supported("--port"),
    supported("--chat-template"),
    supported("--chat-template-content-format"),
    supported("--chat-template-text-format", our_name="--chat-template-content-format"),
    supported("--log-level", convert=str.upper),
    no_effect("--uvicorn-log-level", "--log-level is for the whole process"),
    no_effect("--disable-log-requests", _LOGS, _NOTHING),
    no_effect("--max-log-len", _LOGS),
    supported("--response-role"),
    no_effect("--disable-frontend-multiprocessing", "the scheduler is a separate process", _NOTHING),
    no_effect("--disable-fastapi-docs", "/docs is served only with --enable-docs", _NOTHING),
    supported(
        "--enable-request-id-headers", _NOTHING, why="ids are sent without it too, except for probes such as /health"
    ),
    supported("--api-key", why=_KEY),
    supported("--ssl-keyfile"),
    supported("--ssl-certfile"),
    supported("--ssl-ca-certs"),
    supported("--ssl-cert-reqs"),
    supported("--allow-credentials", _NOTHING, why="needs explicit origins"),
    supported("--allowed-origins", why=_CORS),
    supported("--allowed-methods", why=_CORS),
    supported("--allowed-headers", why=_CORS),
    supported("--root-path"),
    refused("--middleware", "third-party code is not run in the scheduler"),
    supported("--return-tokens-as-token-ids", _NOTHING),
    supported("--enable-prompt-tokens-details", _NOTHING),
    no_effect(
        "--enable-auto-tool-choice", "a tool parser enables it: --tool-call-parser's, or the chat template's", _NOTHING
    ),
    supported("--tool-call-parser"),
    refused("--tool-parser-plugin", "third-party code is not run in the scheduler"),
)
