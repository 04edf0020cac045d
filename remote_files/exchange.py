"""One HTTP exchange with a checked address: no proxy, no cookie, no added credential, no secret in an error."""

import contextlib
import errno
import socket
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterator, Mapping

import aiohttp
from aiohttp.abc import AbstractResolver

from remote_files.addresses import AddressRules
from remote_files.exchange_deadline import ExchangeDeadline
from remote_files.os_errors import system_message
from remote_files.retries import Transient
from remote_files.url import RemoteUrl
from wire.errors import ConfigError

_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "pdserve"}
# (family, type, protocol, canonical name, address), as getaddrinfo gives it.
AddressInfo = tuple[int, int, int, str, tuple[object, ...]]


class CheckedSockets:
    """Opens sockets for addresses that the rules allow. It checks the very address that is connected to.

    So neither DNS rebinding, nor a redirect, nor another parser of the URL can bypass the check.
    """

    def __init__(self, rules: AddressRules) -> None:
        self._rules = rules
        self.refusals: list[str] = []

    def __call__(self, info: AddressInfo) -> socket.socket:
        """Return a socket for this address; raise OSError, and keep the reason, if it is not allowed."""
        family, kind, protocol, _, address = info
        refusal = self._rules.refusal(str(address[0]))
        if refusal is not None:
            self.refusals.append(refusal)
            raise OSError(errno.EACCES, refusal)
        return socket.socket(family=family, type=kind, proto=protocol)


class AllowedServers:
    """The servers that transfers may connect to: the rules, the resolver of names (None: the system's), and the hosts.

    Without `hosts` every host is allowed, otherwise only these, also after a redirect.
    """

    def __init__(
        self, rules: AddressRules, resolver: AbstractResolver | None = None, hosts: Collection[str] = ()
    ) -> None:
        self.rules = rules
        self._resolver = resolver
        self._hosts = frozenset(map(str.lower, hosts))

    @contextlib.asynccontextmanager
    async def exchange(
        self,
        method: str,
        url: RemoteUrl,
        deadline: ExchangeDeadline,
        on_connected: Callable[[], None],
        *,
        headers: Mapping[str, str] | None = None,
        body: AsyncIterable[bytes] | None = None,
        expect100: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer to one request, without following redirects; the connection is closed at the end.

        Raises ConfigError if the host or its address is not allowed or the certificate not trusted, Transient if the
        network fails or `deadline` expires.
        """
        if self._hosts and url.host.lower() not in self._hosts:
            raise ConfigError(f"{url}: {url.host} is not one of the allowed hosts")
        sockets = CheckedSockets(self.rules)

        async def without_retry(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            # Translate errors here too: the library itself would retry after its own errors.
            with _translate_errors(url, sockets, deadline):
                return await handler(request)

        with _translate_errors(url, sockets, deadline):
            async with (
                deadline,
                self._open_session(sockets, on_connected, without_retry) as session,
                session.request(
                    method, url.url, headers=headers, data=body, expect100=expect100, allow_redirects=False
                ) as response,
            ):
                yield response

    def _open_session(
        self, sockets: CheckedSockets, on_connected: Callable[[], None], without_retry: aiohttp.ClientMiddlewareType
    ) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=self._resolver, use_dns_cache=False, force_close=True, socket_factory=sockets
        )
        return aiohttp.ClientSession(
            connector=connector,
            headers=_HEADERS,
            skip_auto_headers=("Content-Type",),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            middlewares=(without_retry,),
            trace_configs=[_trace_of(on_connected)],
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        )


def _trace_of(on_connected: Callable[[], None]) -> aiohttp.TraceConfig:
    async def connected(*_: object) -> None:
        on_connected()

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(connected)
    return trace


@contextlib.contextmanager
def _translate_errors(url: RemoteUrl, sockets: CheckedSockets, deadline: ExchangeDeadline) -> Iterator[None]:
    """Translate the library's errors. Their texts may contain the whole URL, so neither text nor chain is kept."""
    try:
        yield
    except aiohttp.ClientConnectorCertificateError as error:
        reason = getattr(error.certificate_error, "verify_message", "") or type(error.certificate_error).__name__
        raise ConfigError(f"{url}: the certificate of {url.host} is not trusted: {reason}") from None
    except aiohttp.ClientConnectorError as error:
        if sockets.refusals:
            raise ConfigError(f"{url}: {'; '.join(dict.fromkeys(sockets.refusals))}") from None
        raise Transient(f"no connection to {url.host}:{url.port}: {system_message(error.os_error)}") from None
    except aiohttp.ServerDisconnectedError:
        raise Transient("the server closed the connection without an answer") from None
    except aiohttp.ClientPayloadError:
        raise Transient("the answer was cut off") from None
    except aiohttp.ClientResponseError:
        raise Transient("the answer is not HTTP") from None
    except TimeoutError:
        raise Transient(str(deadline)) from None
    except (aiohttp.ClientError, OSError) as error:
        raise Transient(f"the connection was lost: {system_message(error)}") from None
