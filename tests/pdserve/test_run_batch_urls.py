"""Part A1: files of a batch at URLs, fetched and uploaded by the command."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pdserve.batches import BATCH, CONTENT, LOOPBACK, NO_MODEL, SAID, run_here, texts, write
from tests.pdserve.loopback import Loopback

pytestmark = pytest.mark.cluster

SIGNATURE = "?X-Amz-Signature=5ec3e7&X-Amz-Expires=3600"


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    with Loopback({"/in.jsonl": CONTENT}) as server:
        yield server


@pytest.mark.covers("A1.13")
def test_an_input_is_fetched_from_a_url(tmp_path: Path, loopback: Loopback) -> None:
    source = f"{loopback.url}/in.jsonl{SIGNATURE}"

    ended = run_here(tmp_path, "-i", source, "-o", "out.jsonl", "--base-url", loopback.url, *LOOPBACK)

    assert ended.status == 0, ended.err
    assert texts((tmp_path / "out.jsonl").read_bytes()) == SAID


@pytest.mark.covers("A1.13")
def test_a_url_without_a_file_ends_the_run_before_the_model_loads(tmp_path: Path, loopback: Loopback) -> None:
    ended = run_here(tmp_path, "-i", f"{loopback.url}/gone{SIGNATURE}", "-o", "out.jsonl", *NO_MODEL, *LOOPBACK)

    assert ended.status != 0
    assert "404" in ended.err
    assert "5ec3e7" not in ended.err
    assert "/no/such/model" not in ended.err


@pytest.mark.covers("A1.13")
def test_local_addresses_are_refused_without_a_flag(tmp_path: Path, loopback: Loopback) -> None:
    here, there = f"{loopback.url}/in.jsonl", str(write(tmp_path / "in.jsonl", BATCH))
    fetched = run_here(tmp_path, "-i", here, "-o", "out.jsonl", *NO_MODEL)
    sent = run_here(tmp_path, "-i", there, "-o", f"{loopback.url}/out", *NO_MODEL)

    for ended in (fetched, sent):
        assert ended.status == 2
        assert "127.0.0.1" in ended.err
        assert "not a public address" in ended.err
    assert loopback.puts == []


@pytest.mark.covers("A1.14")
@pytest.mark.parametrize("statuses", [[], [503]], ids=["taken", "503 first"])
def test_an_output_is_uploaded_to_a_url_whole_and_once(tmp_path: Path, loopback: Loopback, statuses: list[int]) -> None:
    loopback.statuses = list(statuses)
    target, waiting = f"{loopback.url}/out{SIGNATURE}", tmp_path / "waiting"

    ended = run_here(
        tmp_path, "-i", write(tmp_path / "in.jsonl", BATCH), "-o", target, "--base-url", loopback.url,
        *LOOPBACK, "--output-tmp-dir", waiting,
    )  # fmt: skip

    assert ended.status == 0, ended.err
    assert len(loopback.puts) == len(statuses) + 1
    path, sent = loopback.puts[-1]
    assert (path, texts(sent)) == (f"/out{SIGNATURE}", SAID)
    assert {content for _, content in loopback.puts} == {sent}
    assert not any("Authorization" in headers for headers in loopback.headers)
    assert [*waiting.iterdir()] == []
    assert "5ec3e7" not in ended.out + ended.err


@pytest.mark.covers("A1.14")
def test_a_refused_upload_ends_the_run_and_can_be_repeated(tmp_path: Path, loopback: Loopback) -> None:
    loopback.statuses, waiting = [403], tmp_path / "waiting"
    source = write(tmp_path / "in.jsonl", BATCH)
    words = ("-i", source, "--base-url", loopback.url, *LOOPBACK, "--output-tmp-dir", waiting)

    refused = run_here(tmp_path, *words, "-o", f"{loopback.url}/out{SIGNATURE}")
    fields = dict(loopback.requests)
    (kept,) = (path for path in waiting.iterdir() if path.suffix == ".jsonl")
    strange = write(kept.with_name(f"{kept.name}.asked"), ["of somebody else"])
    again = run_here(tmp_path, *words, "-o", f"{loopback.url}/out?X-Amz-Signature=another")

    assert refused.status != 0
    assert "AccessDenied: the bucket says no" in refused.err
    assert str(kept) in refused.err
    assert "5ec3e7" not in refused.err
    assert again.status == 0, again.err
    assert loopback.requests == fields, "no line is sent a second time"
    assert texts(loopback.puts[-1][1]) == SAID
    assert [*waiting.iterdir()] == [strange]


def test_an_expired_output_url_is_refused_before_the_model_loads(tmp_path: Path, loopback: Loopback) -> None:
    write(tmp_path / "in.jsonl", BATCH)
    target = f"{loopback.url}/out?AWSAccessKeyId=A&Signature=5ec3e7&Expires=1715800091"

    ended = run_here(tmp_path, "-i", "in.jsonl", "-o", target, *NO_MODEL, *LOOPBACK)

    assert ended.status == 2
    assert "has expired at 2024-05-15 19:08:11 UTC" in ended.err
    assert "5ec3e7" not in ended.err
