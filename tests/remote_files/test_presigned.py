"""What the query of a presigned URL contains; the forms are those of the stores' own documents."""

from datetime import UTC, datetime

import pytest

from remote_files.presigned import expires_at, is_bound_to_headers, is_presigned, missing_headers

V2 = "AWSAccessKeyId=ABC&Signature=abc%3D&Expires=1715800091"
V4 = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=20261122T010203Z&X-Amz-Expires=3600&X-Amz-Signature=00"
GOOGLE = "X-Goog-Date=20261122T010203Z&X-Goog-Expires=60&X-Goog-Signature=00"
AZURE = "sv=2024-11-04&se=2026-11-22T02%3A00%3A00Z&sr=b&sp=r&sig=abc%3D"


@pytest.mark.parametrize(
    "query", [V2, V4, V4.lower(), GOOGLE, AZURE, "OSSAccessKeyId=a&Expires=1&Signature=b", "a=1&x-oss-signature=2"]
)
def test_a_signed_query_is_recognised(query: str) -> None:
    assert is_presigned(query)


@pytest.mark.parametrize("query", ["", "versionId=3", "design=1", "expires=1", "a=Signature", "signatures=2"])
def test_other_queries_are_not_signed(query: str) -> None:
    assert not is_presigned(query)


@pytest.mark.parametrize(("query", "bound"), [(V2, True), (V4, False), (GOOGLE, False), (AZURE, True), ("a=1", False)])
def test_a_signature_of_version_2_forbids_headers_about_the_content(query: str, bound: bool) -> None:
    assert is_bound_to_headers(query) is bound


@pytest.mark.parametrize(
    ("query", "end"),
    [
        (V2, datetime(2024, 5, 15, 19, 8, 11, tzinfo=UTC)),
        (V4, datetime(2026, 11, 22, 2, 2, 3, tzinfo=UTC)),
        (GOOGLE, datetime(2026, 11, 22, 1, 3, 3, tzinfo=UTC)),
        (AZURE, None),
        ("Expires=17", None),
        ("Signature=a&Expires=soon", None),
        ("Signature=a&Expires=99999999999999999999", None),
        ("X-Amz-Date=20261122T010203Z", None),
        ("X-Amz-Date=now&X-Amz-Expires=1", None),
    ],
)
def test_the_expiry_of_a_signature_is_read_if_it_is_in_the_url(query: str, end: datetime | None) -> None:
    assert expires_at(query) == end


@pytest.mark.parametrize(
    ("query", "missing"),
    [
        ("", []),
        (V2, []),
        (f"{V4}&X-Amz-SignedHeaders=host", []),
        (f"{V4}&X-Amz-SignedHeaders=content-length%3Bcontent-md5%3Bhost", []),
        (f"{V4}&X-Amz-SignedHeaders=content-type%3Bhost%3BX-Amz-Meta-A", ["content-type", "x-amz-meta-a"]),
        (f"{GOOGLE}&X-Goog-SignedHeaders=content-type;host", ["content-type"]),
    ],
)
def test_headers_that_are_signed_and_not_sent_are_found(query: str, missing: list[str]) -> None:
    assert missing_headers(query) == missing
