"""Which web pages may ask: CORS by starlette, where --allowed-origins names any."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from scheduler.config import SchedulerOptions
from wire.errors import ConfigError


def with_cors(app: ASGIApp, options: SchedulerOptions) -> ASGIApp:
    """Return `app`, or `app` behind the answers to preflight requests, which carry no key. Raises ConfigError."""
    if not options.allowed_origins:
        if options.allow_credentials:
            raise ConfigError("--allow-credentials is for the pages of --allowed-origins: name them")
        return app
    if options.allow_credentials and "*" in options.allowed_origins:
        raise ConfigError("--allow-credentials with --allowed-origins *: any page could use a visitor's; name origins")
    return CORSMiddleware(
        app,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        expose_headers=("x-request-id",),
    )
