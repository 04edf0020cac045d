"""vLLM's flags of the HTTP server, 0.5 and 0.6."""

from typing import Final

from pdserve.flags.row import Takes, VllmFlag, no_effect, refused, supported

_NOTHING = Takes.NOTHING
_TLS = "the front door speaks plain HTTP: let a proxy in front end TLS"
_CORS = "no CORS headers are sent: let a proxy in front send them"
_LOGS = "prompts are never logged"
_TOOLS = "tool calls are not supported yet"

SERVER_ROWS: Final[tuple[VllmFlag, ...]] = (
    supported("--host"),
    supported("--port"),
    supported("--chat-template"),
    supported("--log-level", spelled=str.upper),
    no_effect("--uvicorn-log-level", "--log-level is for the whole process"),
    no_effect("--disable-log-requests", _LOGS, _NOTHING),
    no_effect("--max-log-len", _LOGS),
    no_effect("--disable-log-stats", "figures are on /metrics, not in the log", _NOTHING),
    supported("--response-role"),
    no_effect("--chat-template-content-format", "parts of text are joined", only=("auto", "string")),
    no_effect("--chat-template-text-format", "parts of text are joined", only=("string",)),
    no_effect("--disable-frontend-multiprocessing", "the front door is a process of its own", _NOTHING),
    no_effect("--disable-fastapi-docs", "/docs is served with --enable-docs alone", _NOTHING),
    no_effect("--enable-request-id-headers", "X-Request-Id is always sent", _NOTHING),
    refused("--api-key", "clients are not asked for a key: let a proxy in front ask for it"),
    refused("--ssl-keyfile", _TLS),
    refused("--ssl-certfile", _TLS),
    refused("--ssl-ca-certs", _TLS),
    refused("--ssl-cert-reqs", _TLS),
    refused("--allow-credentials", _CORS, _NOTHING),
    refused("--allowed-origins", _CORS),
    refused("--allowed-methods", _CORS),
    refused("--allowed-headers", _CORS),
    refused("--root-path", "paths are served as they stand: let the proxy in front strip its prefix"),
    refused("--middleware", "no code of others runs in the front door"),
    supported("--return-tokens-as-token-ids", _NOTHING),
    supported("--enable-prompt-tokens-details", _NOTHING),
    refused("--enable-auto-tool-choice", _TOOLS, _NOTHING),
    refused("--tool-call-parser", _TOOLS),
    refused("--tool-parser-plugin", _TOOLS),
)
