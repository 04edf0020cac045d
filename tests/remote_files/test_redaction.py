"""Which parts of URLs and of servers' messages about them may be printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_files.redaction import redacted, redacted_text

V2 = "https://s3.us-west-2.amazonaws.com/bucket/in.jsonl?AWSAccessKeyId=ABCDEFGHIJ&Signature=abc%2Bdef%2Fgh%3D&Expires=17"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("results.jsonl", "results.jsonl"),
        ("/data/a?b#c.jsonl", "/data/a?b#c.jsonl"),
        ("note: a?b", "note: a?b"),
        ("https://host/path/in.jsonl", "https://host/path/in.jsonl"),
        ("https://host:9000/a@b.jsonl", "https://host:9000/a@b.jsonl"),
        ("http://[::1]:80/a", "http://[::1]:80/a"),
        (V2, "https://s3.us-west-2.amazonaws.com/bucket/in.jsonl?(hidden)"),
        ("https://host/in?", "https://host/in?"),
        ("https://host?sig=secret", "https://host?(hidden)"),
        ("https://host/in#access_token=secret", "https://host/in#(hidden)"),
        ("https://me:secret@host/in?sig=1#2", "https://(hidden)@host/in?(hidden)"),
        ("https://me:se@cret@host/in", "https://(hidden)@host/in"),
        ("https://me:sec/ret@host/in", "https://(hidden)"),
        ("https://me:sec?ret@host/in", "https://(hidden)"),
        ("HTTPS://host/in?sig=secret", "HTTPS://host/in?(hidden)"),
        ("http:/host/in?sig=secret", "http:/host/in?(hidden)"),
        ("http:\\\\host\\in?sig=secret", "http:\\\\host\\in?(hidden)"),
        ("s3://me:secret@bucket/key", "s3://(hidden)@bucket/key"),
        ("https://host/in?a\nsig=secret", "https://host/in?(hidden)"),
        ("https://ho\u3002st/in?sig=secret", "https://(hidden)"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_query_fragment_user_and_password(url: str, shown: str) -> None:
    assert redacted(url) == shown


@given(st.text("ab.:/\\@[]%\n ", max_size=12), st.text("?#", min_size=1, max_size=2), st.text("a?#/@&=", max_size=5))
def test_nothing_after_a_question_mark_is_shown_of_any_url(text: str, mark: str, more: str) -> None:
    assert "SECRET" not in redacted(f"https://{text}{mark}{more}SECRET")


@pytest.mark.parametrize(
    "message",
    [
        "<SignatureProvided>abc+def/gh=</SignatureProvided>",
        "the signature abc%2Bdef%2Fgh%3D is wrong",
        "no key ABCDEFGHIJ",
        f"GET {V2} was refused",
        "see https://elsewhere/x?token=abc+def/gh=",
    ],
)
def test_a_servers_message_loses_all_forms_of_the_querys_secrets(message: str) -> None:
    words = redacted_text(message, V2)

    assert "(hidden)" in words
    assert not any(secret in words for secret in ("abc+def", "abc%2Bdef", "ABCDEFGHIJ"))


def test_secrets_are_redacted_also_escaped_or_within_credentials() -> None:
    url = "https://host/a?X-Amz-Credential=AKIDEXAMPLE%2F20261122%2Fs3&X-Amz-Signature=a%26%22secret"

    words = redacted_text('<Sig>a&amp;&quot;secret</Sig> <AWSAccessKeyId>AKIDEXAMPLE</AWSAccessKeyId> a&"secret', url)

    assert "secret" not in words
    assert "AKIDEXAMPLE" not in words


def test_user_and_password_are_removed_from_a_servers_message() -> None:
    assert redacted_text("no user me:secret here", "https://me:secret@host/a") == "no user (hidden) here"


def test_a_servers_message_is_one_short_line_of_printable_text() -> None:
    words = redacted_text("\x1b[2Jred\r\nnext\u202eline " + "x" * 1000, "https://host/a")

    assert words.startswith("[2Jred next line xxx")
    assert len(words) == 300
    assert words.isprintable()
