"""Where redirects and names may lead a transfer: the address that is checked is the one connected to."""

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from remote_files.addresses import AddressRules
from remote_files.download import download
from remote_files.limits import DownloadLimits, Retries, Waits
from remote_files.upload import upload
from remote_files.url import RemoteUrl
from tests.remote_files.raw_server import LOOPBACK, answer, in_turn, ok, raw_server
from wire.errors import ConfigError, Unavailable

pytestmark = pytest.mark.anyio

LIMITS = DownloadLimits(waits=Waits(connect_s=5, idle_s=5), retries=Retries(tries=2, first_delay_s=0.001))
ONE = AddressRules.of(["127.0.0.1"])


class Names(AbstractResolver):
    """Answers each lookup with the next list of addresses, the last one from then on."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.lookups = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.lookups += 1
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return [
            ResolveResult(
                hostname=host, host=address, port=port, flags=0, proto=socket.IPPROTO_TCP,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            )
            for address in found
        ]  # fmt: skip

    async def close(self) -> None:
        """Nothing is open."""


def _redirect_to(location: str, status: str = "302 Found") -> bytes:
    return answer(status, b"", f"Location: {location}")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "LOCALHOST"])
async def test_loopback_is_refused_before_any_connection(tmp_path: Path, host: str) -> None:
    async with raw_server(in_turn(ok(b"secret"))) as server:
        with pytest.raises(ConfigError, match="is not a public address: --allow-private-urls"):
            await download(server.url(host=host), tmp_path / "in", rules=AddressRules(), limits=LIMITS)
        with pytest.raises(ConfigError, match="is not a public address: --allow-private-urls"):
            await upload(Path(__file__), server.url(host=host), rules=AddressRules())

        assert server.requests == []


@pytest.mark.parametrize(
    "host",
    ["[::1]", "[::ffff:127.0.0.1]", "10.0.0.1", "[::ffff:10.0.0.1]", "169.254.169.254", "[fd00:ec2::254]",
     "100.100.100.200"],
)  # fmt: skip
async def test_other_addresses_in_the_url_itself_are_refused_too(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a public address|pdserve never connects to"):
        await download(f"http://{host}/latest/meta-data/", tmp_path / "in", rules=AddressRules(), limits=LIMITS)


@pytest.mark.parametrize("name", ["localhost.", "metadata.google.internal", "rebound.example"])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "169.254.169.254", "fe80::1", "10.1.2.3", "::ffff:127.0.0.1"])
async def test_a_name_is_judged_by_its_address(tmp_path: Path, name: str, address: str) -> None:
    names = Names([address])
    refusal = f"({address} is not a public address|pdserve never connects to {address} )"
    with pytest.raises(ConfigError, match=f"http://{name}/in: {refusal}"):
        await download(f"http://{name}/in", tmp_path / "in", rules=AddressRules(), limits=LIMITS, resolver=names)

    assert names.lookups == 1


async def test_a_host_name_is_resolved_and_checked_at_each_connection(tmp_path: Path) -> None:
    names = Names(["127.0.0.1"], ["127.0.0.2"])
    async with raw_server(in_turn(answer("503 Later"), ok(b"secret"))) as server:
        with pytest.raises(ConfigError, match=r"127\.0\.0\.2 is not a public address"):
            await download(
                server.url(host="rebound.example"), tmp_path / "in", rules=ONE, limits=LIMITS, resolver=names
            )

        assert len(server.requests) == names.lookups - 1 == 1


async def test_a_name_is_looked_up_once_per_connection(tmp_path: Path) -> None:
    names = Names(["127.0.0.1"], ["127.0.0.2"])
    async with raw_server(in_turn(ok(b"hello"))) as server:
        await download(server.url(host="rebound.example"), tmp_path / "in", rules=ONE, limits=LIMITS, resolver=names)

    assert names.lookups == 1


async def test_of_two_addresses_of_a_name_the_allowed_one_is_used(tmp_path: Path) -> None:
    names = Names(["169.254.169.254", "127.0.0.1"])
    async with raw_server(in_turn(ok(b"hello"))) as server:
        await download(server.url(host="two.example"), tmp_path / "in", rules=ONE, limits=LIMITS, resolver=names)

    assert (tmp_path / "in").read_bytes() == b"hello"


async def test_an_unknown_name_is_retried_and_reported(tmp_path: Path) -> None:
    class NoNames(Names):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            self.lookups += 1
            raise OSError(None, "no such name")

    names = NoNames()
    with pytest.raises(Unavailable, match=r"no connection to none\.example:443"):
        await download("https://none.example/in", tmp_path / "in", rules=ONE, limits=LIMITS, resolver=names)

    assert names.lookups == 2


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_a_redirect_is_followed_to_the_file(tmp_path: Path, status: str) -> None:
    async with raw_server(in_turn(_redirect_to("/b?x=%2b", status), ok(b"hello"))) as server:
        await download(server.url("/a"), tmp_path / "in", rules=LOOPBACK, limits=LIMITS)

        assert [request.target for request in server.requests] == ["/a", "/b?x=%2b"]
    assert (tmp_path / "in").read_bytes() == b"hello"


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("http://169.254.169.254/latest/meta-data/", "pdserve never connects to"),
        ("http://127.0.0.2:1/", "is not a public address"),
        ("//127.0.0.2:1/", "is not a public address"),
        ("http://[::ffff:169.254.169.254]/", "pdserve never connects to"),
        ("http://2130706433/", "must be in its full form"),
        ("http://ok.example@127.0.0.2/", "must not contain a user or password"),
        ("file:///etc/passwd", "begins with http:// or https://"),
        ("http://ok.example\\@127.0.0.2/", "no backslash"),
        ("http://ok.example/#@127.0.0.2/", "no fragment"),
        ("http://\u24d4k.example/", "only visible ASCII characters"),
        ("", "redirects without a Location header"),
    ],
)
async def test_a_redirect_is_checked_as_the_url_is(tmp_path: Path, location: str, why: str) -> None:
    async with raw_server(in_turn(_redirect_to(location))) as server:
        with pytest.raises(ConfigError, match=why):
            await download(server.url(), tmp_path / "in", rules=ONE, limits=LIMITS)

        assert len(server.requests) == 1


async def test_redirects_are_limited(tmp_path: Path) -> None:
    async with raw_server(in_turn(_redirect_to("/again"))) as server:
        with pytest.raises(ConfigError, match="more than 5 redirects"):
            await download(server.url(), tmp_path / "in", rules=LOOPBACK, limits=LIMITS)

        assert len(server.requests) == 6


@pytest.mark.parametrize(
    "query", ["?Signature=SECRET&Expires=1", "?X-Amz-Signature=SECRET", "?x-amz-algorithm=a", "?sig=SECRET"]
)
async def test_a_presigned_url_is_never_redirected(tmp_path: Path, query: str) -> None:
    async with raw_server(in_turn(_redirect_to("/elsewhere"))) as server:
        with pytest.raises(ConfigError, match=r"\(hidden\): the .* 302, and redirects of a presigned URL") as caught:
            await download(server.url(f"/in{query}"), tmp_path / "in", rules=LOOPBACK, limits=LIMITS)

        assert len(server.requests) == 1
        assert "SECRET" not in str(caught.value)


async def test_a_redirect_to_a_presigned_url_is_followed_once(tmp_path: Path) -> None:
    async with raw_server(in_turn(_redirect_to("/b?sig=SECRET"), _redirect_to("/c"))) as server:
        with pytest.raises(ConfigError, match=r"/b\?\(hidden\): the .* 302, and redirects of a presigned URL"):
            await download(server.url("/a"), tmp_path / "in", rules=LOOPBACK, limits=LIMITS)

        assert [request.target for request in server.requests] == ["/a", "/b?sig=SECRET"]


async def test_no_redirect_leads_from_https_to_http() -> None:
    with pytest.raises(ConfigError, match="redirects from https to http are not followed"):
        RemoteUrl.parse("https://h/a").target("http://h/b")
