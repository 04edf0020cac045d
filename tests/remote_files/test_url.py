"""How the URL of a remote file is parsed, and how it is shown."""

from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_files.url import RemoteUrl, is_remote
from wire.errors import ConfigError

SIGNED = (
    "https://s3.us-west-2.amazonaws.com/b/in.jsonl?AWSAccessKeyId=ABCDEF&Signature=secret%2Bsecret&Expires=1715800091"
)
SIGNED_4 = (
    "http://127.0.0.1:9/b/in.jsonl?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AK%2F1&X-Amz-Date=20261122T010203Z"
    "&X-Amz-Expires=3600&X-Amz-SignedHeaders=host&X-Amz-Signature=secretsecret"
)

OTHER_SCHEMES = [
    "file:///etc/passwd",
    "gopher://h/x",
    "ftp://h/x",
    "s3://bucket/key",
    "data://text",
    "jar:http://h/x",
    "//h/x",
]
TWO_READERS = [
    "http://ok.example\\@169.254.169.254/", "http://ok.example#@10.0.0.1/", "http://me:secret@ok.example/",
    "http://ok.example@10.0.0.1/", "http://@10.0.0.1/", "http://ok.example:80@10.0.0.1/", "http:\\\\ok.example/x",
    "http:/ok.example/x", "http:///ok.example/x", "http://", "http://?x", "http://:80/x", "http:ok.example",
    "http://ok.example\r\nHost: 10.0.0.1/", "http://ok.example/a\r\nX: y", "http://ok.example/a b", " http://ok.example/",
    "http://ok.example/\x00", "http://ok.example/\t", "http://169\u3002254\u3002169\u3002254/", "http://\uff11\uff12\uff17.1/",
    "http://ok\uff0eexample/", "http://\u24d4xample.com/", "http://ok.example/\u4e2d", "http://o%6b.example/",
    "http://[fe80::1%25lo]/", "http://[::1/", "http://[ok.example]/", "http://[1.2.3.4]/", "http://::1/",
    "http://ok.example:99999/", "http://ok.example:0/",
    "http://ok.example:-1/", "http://ok.example:8 0/", "http://ok..example/", "http://./",
    "http://ok.example,10.0.0.1/", "http://ok.example;10.0.0.1/", "http://ok.example|10.0.0.1/", "http://{host}/",
]  # fmt: skip
SHORT_FORMS = [
    "0x7f.1", "127.1", "2130706433", "0x7f000001", "017700000001", "0177.0.0.1", "127.0.0.1.", "127.0.1", "0", "0x",
    "1.2.3.4.5", "256.1.1.1", "[::ffff:1.2.3.4.5]", "[:::1]", "127.1.", "169.254.43518", "0xA9FEA9FE",
]  # fmt: skip


@pytest.mark.parametrize("text", OTHER_SCHEMES)
def test_schemes_other_than_http_and_https_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="begins with http:// or https:// and a host"):
        RemoteUrl.parse(text)


@pytest.mark.parametrize("text", TWO_READERS)
def test_ambiguous_urls_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"URL of a file|visible ASCII|cannot be read|full form") as caught:
        RemoteUrl.parse(text)

    assert "secret" not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("host", SHORT_FORMS)
def test_an_address_in_an_unusual_notation_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="must be in its full form"):
        RemoteUrl.parse(f"http://{host}/x")


_TEXTS = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["http://", "https://", "HTTP://", "http:"]),
    st.one_of(st.sampled_from(["ok.example", "127.0.0.1", "[::1]"]), st.text("ab.01:-_[]@%x\u3002", max_size=8)),
    st.sampled_from(["", ":80", ":0", "/", "?", "/", "?", "/x", "\\", "#", "@", ":pw@", ".", "\r\n", "\t"]),
    st.text("a/?@:%2.&=", max_size=6),
)


def _read(text: str) -> RemoteUrl | str:
    try:
        return RemoteUrl.parse(text)
    except ConfigError as error:
        return str(error)


@given(_TEXTS)
def test_other_parsers_see_the_same_host_in_accepted_urls(text: str) -> None:
    found = _read(text)
    if isinstance(found, str):
        assert found.isprintable()
        return

    one, two = urlsplit(text), httpx.URL(text)
    port = one.port or {"http": 80, "https": 443}[one.scheme]
    assert (found.host.lower(), found.port) == (one.hostname, port)
    assert (found.host.lower(), found.port) == (two.host, two.port or port)


@pytest.mark.parametrize(
    ("text", "host", "port", "sent"),
    [
        ("http://ok.example", "ok.example", 80, "/"),
        ("HTTPS://Ok-1.example./a", "Ok-1.example.", 443, "/a"),
        ("http://minio_1:9000/a", "minio_1", 9000, "/a"),
        ("http://8.8.8.8:1/a", "8.8.8.8", 1, "/a"),
        ("http://[2001:db8::1]:8080/a", "2001:db8::1", 8080, "/a"),
        ("http://xn--fsq.example/a", "xn--fsq.example", 80, "/a"),
        ("http://v2.0x.example/a", "v2.0x.example", 80, "/a"),
        ("http://h/a/../b//c?x=%2b+%7E~;=&&y=%zz?/@:", "h", 80, "/a/../b//c?x=%2b+%7E~;=&&y=%zz?/@:"),
        ("http://h?x=1", "h", 80, "/?x=1"),
    ],
)
def test_a_plain_url_keeps_its_bytes(text: str, host: str, port: int, sent: str) -> None:
    found = RemoteUrl.parse(text)

    assert (found.host, found.port, found.url.raw_path_qs) == (host, port, sent)


def test_str_repr_and_format_hide_the_query() -> None:
    found = RemoteUrl.parse(SIGNED)

    for shown in (str(found), repr(found), f"{found}", f"{found!r}", "%s" % found, repr([found])):  # noqa: UP031
        assert "https://s3.us-west-2.amazonaws.com/b/in.jsonl?(hidden)" in shown
        assert "secret" not in shown


def test_a_url_signed_for_a_header_not_sent_is_refused_first() -> None:
    with pytest.raises(
        ConfigError, match=r"not sent \(content-type\): sign the URL for the host header only"
    ) as caught:
        RemoteUrl.parse(SIGNED_4.replace("SignedHeaders=host", "SignedHeaders=content-type%3Bhost"))

    assert "secret" not in str(caught.value)


def test_a_url_above_the_limit_is_refused_with_the_limit() -> None:
    with pytest.raises(ConfigError, match="16385 characters are above the limit of 16384"):
        RemoteUrl.parse("http://h/".ljust(16_385, "x"))


def test_a_location_is_read_as_strictly_as_a_url() -> None:
    here = RemoteUrl.parse("https://h/a/b?x=1")

    assert str(here.target("/c?d=%2b").url) == "https://h/c?d=%2b"
    assert str(here.target("c").url) == "https://h/a/c"
    assert here.target("//other/c").host == "other"
    for location in (
        "",
        "http://h/c",
        "file:///etc/passwd",
        "https://me:pw@h/",
        "//[",
        "https://o\tk/",
        "/a\\b",
        "/c#d",
    ):
        with pytest.raises(ConfigError):
            here.target(location)


@pytest.mark.parametrize(
    ("name", "remote"),
    [
        ("results.jsonl", False), ("/data/in.jsonl", False), ("a:b.jsonl", False), ("../https", False), ("", False),
        ("http://h/a", True), ("HTTPS://h/a", True), ("http:h", True), ("file:///a", True), ("s3://b/k", True),
        ("http:\\\\h", True),
    ],
)  # fmt: skip
def test_a_name_with_a_scheme_is_remote(name: str, remote: bool) -> None:
    assert is_remote(name) is remote
