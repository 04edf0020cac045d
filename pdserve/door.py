"""`pdserve door`: one process in front of schedulers; its clients notice nothing when a scheduler dies."""

import argparse
import dataclasses
from collections.abc import Sequence
from urllib.parse import urlsplit

from flags.options import add_flags, flag, from_namespace
from pdserve.flags.parser import CommandParser
from pdserve.ports import require_free
from pdserve.stream_proxy import ProxyLimits, StreamProxy
from scheduler.http.drain import Drain
from scheduler.http.listener import listen
from scheduler.http.open_files import raise_open_files
from scheduler.http.server import serve
from scheduler.loop import run
from telemetry import logs
from telemetry.logs import EventLogger
from wire.errors import ConfigError

_log = EventLogger("proxy")
EPILOG = """\
examples:
  pdserve door --port 8080 --to http://127.0.0.1:9000
  pdserve door --host 0.0.0.0 --port 8080 --to http://10.0.0.1:9000 http://10.0.0.2:9000

This process sends each request to one of the schedulers, and continues its stream through another if that one dies. It
stores nothing and checks no keys: the schedulers do. docs/streams.md
"""


@dataclasses.dataclass(frozen=True, slots=True)
class DoorOptions:
    """Flags of `pdserve door`."""

    host: str = flag("127.0.0.1", "address on which it listens")
    port: int = flag(8080, "port on which it listens", parse=int)
    to: tuple[str, ...] = flag(("http://127.0.0.1:9000",), "URLs of the schedulers", many=True)
    wait: float = flag(30.0, "seconds to wait for a scheduler that can go on with a request", parse=float)
    silence: float = flag(15.0, "seconds without an event after which a stream goes on elsewhere", parse=float)
    max_body_bytes: int = flag(16 * 2**20, "largest request body; larger get 413", parse=int)
    log_level: str = flag("INFO", "DEBUG, INFO, WARNING or ERROR", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    shutdown_timeout: float = flag(30.0, "seconds that running requests get after SIGTERM", parse=float)


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError for wrong input."""
    options = parse(argv)
    require_free(options.host, options.port)
    logs.configure(options.log_level)
    raise_open_files()
    run(_serve(options))
    return 0


def parse(argv: Sequence[str]) -> DoorOptions:
    """Parse the command line. Raises ConfigError."""
    parser = CommandParser(
        prog="pdserve door",
        description="Serve the API of pdserve's schedulers, and go on with each stream when its scheduler dies.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, DoorOptions)
    options = from_namespace(DoorOptions, parser.parse_args(argv))
    for url in options.to:
        target = urlsplit(url)
        if target.scheme not in ("http", "https") or not target.netloc or target.path.strip("/") or target.query:
            raise ConfigError(f"--to {url} is not the URL of a server, such as http://127.0.0.1:9000")
    for name in ("wait", "silence", "max_body_bytes"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be more than 0")
    return options


async def _serve(options: DoorOptions) -> None:
    limits, drain = ProxyLimits(options.wait, options.silence, options.max_body_bytes), Drain()
    async with StreamProxy([url.rstrip("/") for url in options.to], limits, drain) as app:
        bound = listen(options.host, options.port)
        _log.info("listening", host=options.host, port=bound.getsockname()[1], to=",".join(options.to))
        await serve(app, bound, drain, shutdown_timeout_s=options.shutdown_timeout)
