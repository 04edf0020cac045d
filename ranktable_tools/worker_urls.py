"""The URL of a worker of another engine: what it may be, and its host and port."""

from urllib.parse import urlsplit

from ranktable_tools.addresses import host_problem
from ranktable_tools.document import ValueFault
from ranktable_tools.tables import TableServer

_FORM = 'must be "http://HOST:PORT" (or https)'
_PORTS = {"http": 80, "https": 443}


def worker_url(text: str) -> str:
    """Return the URL of a worker as scheme, host and port. Raises ValueError with what it must be."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError(_FORM) from None
    if parts.scheme not in _PORTS:
        raise ValueError(f"{_FORM}: no other scheme")
    if "@" in parts.netloc:
        raise ValueError(f"{_FORM}, without a user: a worker's key is read from a file")
    if parts.path not in ("", "/") or "?" in text or "#" in text:
        raise ValueError(f"{_FORM}, without a path or a query")
    problem = host_problem(host)
    if problem is not None:
        raise ValueError(f"{_FORM}; its host: {problem}")
    bare = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}"
    found = f"{bare}:{_PORTS[parts.scheme] if port is None else port}"
    # Equal spelling: urlsplit drops newlines and accepts what only looks like an address.
    if port == 0 or text.lower().removesuffix("/") not in (found, bare):
        raise ValueError(f"{_FORM}, with a port from 1 to 65535")
    return found


def check_url(text: str) -> ValueFault | None:
    """Require the URL of a worker."""
    try:
        worker_url(text)
    except ValueError as error:
        return ValueFault("bad-url", str(error))
    return None


def url_place(url: str) -> tuple[str, int]:
    """Return host and port of a URL that `worker_url` returns, or of an address without a scheme."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    return host.strip("[]"), int(port)


def listed_port(server: TableServer) -> int | None:
    """Return the port of an entry's API as the table has it: that of `url`, else `server_port`."""
    return server.server_port if server.url is None else url_place(server.url)[1]


def url_of(host: str, port: int) -> str:
    """Return the URL of a host, address or name, and a port."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
