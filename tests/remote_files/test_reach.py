"""What is checked about a URL before work is done for it."""

import asyncio
import socket

import pytest

from remote_files.addresses import AddressRules
from remote_files.reachable import check_resolves
from remote_files.url import RemoteUrl
from wire.errors import ConfigError, Unavailable

pytestmark = pytest.mark.anyio

URL = RemoteUrl.parse("https://bucket.example/out?Signature=SECRET")


def _names(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    async def found(host: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "10.0.0.1", "169.254.169.254", "localhost"])
async def test_an_address_that_is_not_allowed_is_refused(host: str) -> None:
    url = RemoteUrl.parse(f"http://{host}/out?Signature=SECRET")

    with pytest.raises(ConfigError, match=r"\?\(hidden\): (\S+ is not a public address|pdserve never connects to \S+)"):
        await check_resolves(url, AddressRules())


async def test_all_reasons_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _names(monkeypatch, "10.0.0.1", "169.254.1.1", "10.0.0.1")

    words = r"10\.0\.0\.1 is not a public address: [^;]*; pdserve never connects to 169\.254\.1\.1 [^;]*$"
    with pytest.raises(ConfigError, match=words):
        await check_resolves(URL, AddressRules())


async def test_one_allowed_address_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    _names(monkeypatch, "10.0.0.1", "8.8.8.8")

    await check_resolves(URL, AddressRules())


async def test_an_unknown_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _names(monkeypatch)

    with pytest.raises(Unavailable, match=r"\(hidden\): cannot resolve bucket\.example: Name or service not known"):
        await check_resolves(URL, AddressRules())


async def test_a_silent_resolver_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", silent)

    with pytest.raises(Unavailable, match=r"cannot resolve bucket\.example within 0\.01 s"):
        await check_resolves(URL, AddressRules(), wait_s=0.01)
