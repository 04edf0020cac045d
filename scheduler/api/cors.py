"""Which web pages may call the API: starlette's CORS middleware, if --allowed-origins names any."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from scheduler.config import SchedulerOptions
from wire.errors import ConfigError


def with_cors(app: ASGIApp, options: SchedulerOptions) -> ASGIApp:
    """Return `app`, or `app` wrapped to answer preflight requests, which carry no API key. Raises ConfigError."""
    if not options.allowed_origins:
        if options.allow_credentials:
            raise ConfigError("--allow-credentials needs --allowed-origins: name the allowed origins")
        return app
    if options.allow_credentials and "*" in options.allowed_origins:
        raise ConfigError("--allow-credentials cannot be used with --allowed-origins *: name the allowed origins")
    return CORSMiddleware(
        app,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        expose_headers=("x-request-id", "x-pdserve-stream"),
    )
