"""The URL of a worker of another engine: what it may be, and its host and port."""

from urllib.parse import urlsplit

from ranktable_tools.addresses import host_problem
from ranktable_tools.document import ValueFault
from ranktable_tools.ports import parse_port
from ranktable_tools.tables import TableServer

_FORM = 'must be "http://HOST:PORT"'


def worker_url(text: str) -> ValueFault | None:
    """Require scheme, host and port, and nothing else."""
    advice = _problem(text)
    return None if advice is None else ValueFault("bad-url", advice)


def url_place(url: str) -> tuple[str, int]:
    """Return host and port of a URL that `worker_url` accepts, or of an address without a scheme."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    return host.strip("[]"), int(port)


def listed_port(server: TableServer) -> int | None:
    """Return the port of an entry's API as the table has it: of `url`, else `server_port`."""
    return server.server_port if server.url is None else url_place(server.url)[1]


def url_of(host: str, port: int) -> str:
    """Return the URL of a host, address or name, and a port."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _problem(text: str) -> str | None:
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
    except ValueError:
        return _FORM
    if parts.scheme != "http":
        return f"{_FORM}: no scheme but http"
    if "@" in parts.netloc:
        return f"{_FORM}, without a user: a worker's key is read from a file"
    if parts.path or "?" in text or "#" in text:
        return f"{_FORM}, without a path or a query"
    port = parse_port(parts.netloc.rpartition(":")[2])
    # Equal spelling: urlsplit drops newlines and accepts what only looks like an address.
    if port is None or text.lower() != url_of(host, port):
        return f"{_FORM}, with a port from 1 to 65535"
    problem = host_problem(host)
    return None if problem is None else f"{_FORM}; its host: {problem}"
