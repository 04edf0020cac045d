"""Check, before any work is done for a URL, that it resolves to an allowed address."""

import asyncio
import socket

from remote_files.addresses import AddressRules
from remote_files.url import RemoteUrl
from wire.errors import ConfigError, Unavailable

_WAIT_S = 10.0


async def check_resolves(url: RemoteUrl, rules: AddressRules, *, wait_s: float = _WAIT_S) -> None:
    """Resolve the host; raise ConfigError, with the reasons, if the rules allow none of its addresses.

    Does not connect; a transfer checks the address again when it connects. Raises Unavailable if the name is
    unknown or does not resolve within `wait_s`.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(wait_s):
            found = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise Unavailable(f"{url}: cannot resolve {url.host} within {wait_s:g} s") from None
    except OSError as error:
        raise Unavailable(f"{url}: cannot resolve {url.host}: {error.strerror or error}") from error
    refusals = [rules.refusal(str(address[0])) for *_, address in found]
    if all(refusals):
        raise ConfigError(f"{url}: {'; '.join(dict.fromkeys(map(str, refusals)))}")
