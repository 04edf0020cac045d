"""vLLM's flags of the HTTP server, 0.5 and 0.6."""

from typing import Final

from pdserve.flags.row import Takes, VllmFlag, no_effect, refused, supported

_NOTHING = Takes.NOTHING
_KEY = "also by PDSERVE_API_KEY or VLLM_API_KEY, and --api-key-file"
_CORS = "a JSON list; no page of another origin may ask without --allowed-origins"
_LOGS = "prompts are never logged"
_TOOLS = "tool calls are not supported yet"

SERVER_ROWS: Final[tuple[VllmFlag, ...]] = (
    supported("--host"),
    supported("--port"),
    supported("--chat-template"),
    supported("--chat-template-content-format"),
    supported("--chat-template-text-format", becomes="--chat-template-content-format"),
    supported("--log-level", spelled=str.upper),
    no_effect("--uvicorn-log-level", "--log-level is for the whole process"),
    no_effect("--disable-log-requests", _LOGS, _NOTHING),
    no_effect("--max-log-len", _LOGS),
    supported("--response-role"),
    no_effect("--disable-frontend-multiprocessing", "the front door is a process of its own", _NOTHING),
    no_effect("--disable-fastapi-docs", "/docs is served with --enable-docs alone", _NOTHING),
    no_effect("--enable-request-id-headers", "X-Request-Id is always sent", _NOTHING),
    supported("--api-key", why=_KEY),
    supported("--ssl-keyfile"),
    supported("--ssl-certfile"),
    supported("--ssl-ca-certs"),
    supported("--ssl-cert-reqs"),
    supported("--allow-credentials", _NOTHING, why="needs origins by name"),
    supported("--allowed-origins", why=_CORS),
    supported("--allowed-methods", why=_CORS),
    supported("--allowed-headers", why=_CORS),
    supported("--root-path"),
    refused("--middleware", "no code of others runs in the front door"),
    supported("--return-tokens-as-token-ids", _NOTHING),
    supported("--enable-prompt-tokens-details", _NOTHING),
    refused("--enable-auto-tool-choice", _TOOLS, _NOTHING),
    refused("--tool-call-parser", _TOOLS),
    refused("--tool-parser-plugin", _TOOLS),
)
