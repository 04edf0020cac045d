"""A1 around the answers: where files come from and go to, what ends a run, and how it goes on."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.client import Client
from pdserve.ports import free_ports
from tests.cluster.guide import CLONE
from tests.pdserve.batches import Ended, read, request, run, write
from tests.pdserve.loopback import Loopback

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

COMMAND = ("-P", "-m", "pdserve", "run-batch")
LOOPBACK = ("--allow-private-urls", "127.0.0.1/32")
NO_MODEL = ("--model", "/no/such/model")
DEADLINE_S = 60.0
SIGNATURE = "?X-Amz-Signature=5ec3e7&X-Amz-Expires=3600"
WORDS = ("one", "two", "three", "four")
BATCH = [request(f"id-{word}", "/v1/completions", prompt=word) for word in WORDS]
CONTENT = "".join(json.dumps(line) + "\n" for line in BATCH).encode()


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    with Loopback({"/in.jsonl": CONTENT}) as server:
        yield server


def texts(output: bytes | str) -> list[str]:
    """Return what the model said, line by line."""
    lines = [json.loads(line) for line in output.splitlines()]
    return [line["response"]["body"]["choices"][0]["text"] for line in lines]


SAID = [f"said {word}" for word in WORDS]


@pytest.mark.parametrize(
    "typed",
    [(), ("-i", "in.jsonl"), ("-o", "out.jsonl"), ("-i", "in.jsonl", "-o", "out.jsonl", "--no-such-flag")],
    ids=" ".join,
)
def test_a1_4_a_wrong_command_line_ends_with_2(tmp_path: Path, typed: tuple[str, ...]) -> None:
    ended = run(tmp_path, *COMMAND, *typed)

    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("pdserve run-batch: ")


def test_a1_4_an_input_that_is_not_there_is_said_before_the_model_is_looked_for(tmp_path: Path) -> None:
    ended = run(tmp_path, *COMMAND, "-i", "none.jsonl", "-o", "out.jsonl", *NO_MODEL)

    assert ended.status != 0
    assert "none.jsonl" in ended.err
    assert "/no/such/model" not in ended.err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"custom_id": "a"', *map(json.dumps, BATCH)], "line 1"),
        ([json.dumps(BATCH[0]), "", '{"method": "POST", "url": "/v1/completions", "body": {}}'], "line 3"),
        ([json.dumps(BATCH[0]), json.dumps(BATCH[1]), json.dumps(BATCH[0])], "line 3"),
    ],
    ids=["no JSON", "no custom_id", "custom_id twice"],
)
def test_a1_24_a_malformed_line_ends_the_run_before_the_model_is_looked_for(
    tmp_path: Path, lines: list[str], words: str
) -> None:
    write(tmp_path / "in.jsonl", lines)

    ended = run(tmp_path, *COMMAND, "-i", "in.jsonl", "-o", "out.jsonl", *NO_MODEL)

    assert ended.status != 0
    assert words in ended.err
    assert "/no/such/model" not in ended.err
    assert not (tmp_path / "out.jsonl").exists()


def test_a1_24_an_empty_file_has_an_empty_answer_and_loads_no_model(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n  \n")

    ended = run(tmp_path, *COMMAND, "-i", "in.jsonl", "-o", "out.jsonl", *NO_MODEL)

    assert (ended.status, (tmp_path / "out.jsonl").read_bytes()) == (0, b""), ended.err


def test_a1_13_an_input_is_fetched_from_a_url(tmp_path: Path, loopback: Loopback) -> None:
    source = f"{loopback.url}/in.jsonl{SIGNATURE}"

    ended = run(tmp_path, *COMMAND, "-i", source, "-o", "out.jsonl", "--base-url", loopback.url, *LOOPBACK)

    assert ended.status == 0, ended.err
    assert texts((tmp_path / "out.jsonl").read_bytes()) == SAID


def test_a1_13_a_url_without_a_file_ends_the_run_before_the_model_is_looked_for(
    tmp_path: Path, loopback: Loopback
) -> None:
    ended = run(tmp_path, *COMMAND, "-i", f"{loopback.url}/gone{SIGNATURE}", "-o", "out.jsonl", *NO_MODEL, *LOOPBACK)

    assert ended.status != 0
    assert "404" in ended.err
    assert "5ec3e7" not in ended.err
    assert "/no/such/model" not in ended.err


def test_a1_13_this_machine_is_not_asked_for_files_unless_a_flag_says_so(tmp_path: Path, loopback: Loopback) -> None:
    here, there = f"{loopback.url}/in.jsonl", str(write(tmp_path / "in.jsonl", BATCH))
    fetched = run(tmp_path, *COMMAND, "-i", here, "-o", "out.jsonl", *NO_MODEL)
    sent = run(tmp_path, *COMMAND, "-i", there, "-o", f"{loopback.url}/out", *NO_MODEL)

    for ended in (fetched, sent):
        assert ended.status == 2
        assert "127.0.0.1" in ended.err
        assert "not a public address" in ended.err
    assert loopback.puts == []


@pytest.mark.parametrize("statuses", [[], [503]], ids=["taken", "503 first"])
def test_a1_14_an_output_is_sent_to_a_url_whole_and_once(
    tmp_path: Path, loopback: Loopback, statuses: list[int]
) -> None:
    loopback.statuses = list(statuses)
    target, waiting = f"{loopback.url}/out{SIGNATURE}", tmp_path / "waiting"

    ended = run(
        tmp_path, *COMMAND, "-i", write(tmp_path / "in.jsonl", BATCH), "-o", target, "--base-url", loopback.url,
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


def test_a1_14_a_place_that_says_no_ends_the_run_in_its_words_and_the_answers_are_sent_later(
    tmp_path: Path, loopback: Loopback
) -> None:
    loopback.statuses, waiting = [403], tmp_path / "waiting"
    source = write(tmp_path / "in.jsonl", BATCH)
    words = (*COMMAND, "-i", source, "--base-url", loopback.url, *LOOPBACK, "--output-tmp-dir", waiting)

    refused = run(tmp_path, *words, "-o", f"{loopback.url}/out{SIGNATURE}")
    asked = dict(loopback.asked)
    (kept,) = (path for path in waiting.iterdir() if path.suffix == ".jsonl")
    again = run(tmp_path, *words, "-o", f"{loopback.url}/out?X-Amz-Signature=another")

    assert refused.status != 0
    assert "AccessDenied: the bucket says no" in refused.err
    assert str(kept) in refused.err
    assert "5ec3e7" not in refused.err
    assert again.status == 0, again.err
    assert loopback.asked == asked, "no line is asked a second time"
    assert texts(loopback.puts[-1][1]) == SAID


def test_a1_19_the_version_is_one_of_python(tmp_path: Path) -> None:
    ended = run(tmp_path, "-P", "-c", "import pdserve; print(pdserve.__version__)")

    assert re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?\n", ended.out)


def test_a1_20_the_page_says_that_this_is_not_the_batch_rest_api() -> None:
    page = " ".join((CLONE / "docs" / "batch.md").read_text().split())

    assert "not the Batch REST API" in page


def test_input_and_output_are_two_files(tmp_path: Path, loopback: Loopback) -> None:
    source, url = write(tmp_path / "in.jsonl", BATCH), f"{loopback.url}/in.jsonl"

    same = run(tmp_path, *COMMAND, "-i", "in.jsonl", "-o", source, *NO_MODEL)
    same_url = run(tmp_path, *COMMAND, "-i", f"{url}?a=1", "-o", f"{url}?a=2", *NO_MODEL, *LOOPBACK)

    assert [one.status for one in (same, same_url)] == [2, 2]
    assert source.read_bytes() == CONTENT
    assert loopback.puts == []


def test_errors_stand_in_a_file_of_their_own_too(tmp_path: Path, loopback: Loopback) -> None:
    write(tmp_path / "in.jsonl", [*BATCH, request("bad", "/bad_url")])

    words = (*COMMAND, "-i", "in.jsonl", "-o", "out.jsonl", "--error-file", "errors.jsonl")
    ended = run(tmp_path, *words, "--base-url", loopback.url)

    assert ended.status == 0, ended.err
    assert [line["custom_id"] for line in read(tmp_path / "errors.jsonl")] == ["bad"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_how_it_goes_on_and_does(tmp_path: Path, number: signal.Signals, status: int) -> None:
    write(tmp_path / "in.jsonl", BATCH)
    with Loopback(free=2) as model:
        model.hold.clear()
        words = [*COMMAND, "-i", "in.jsonl", "-o", "out.jsonl", "--base-url", model.url, "--max-inflight", "3"]
        words += ["--api-key", "sk-5ec3e7"]
        child = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        assert model.held.acquire(timeout=DEADLINE_S)
        assert model.held.acquire(timeout=DEADLINE_S)  # two of four are answered, and these two never will be
        child.send_signal(number)
        _, err = child.communicate(timeout=DEADLINE_S)
        first = sum(model.asked.values())
        there = (tmp_path / "out.jsonl").exists()
        model.hold.set()
        again = run(tmp_path, *words)

    assert (child.returncode, there) == (status, False), err
    said = err.splitlines()
    assert "pdserve run-batch -i in.jsonl -o out.jsonl --base-url" in said[-1]
    assert "sk-5ec3e7" not in err
    assert again.status == 0, again.err
    assert texts((tmp_path / "out.jsonl").read_bytes()) == SAID
    assert (first, sum(model.asked.values())) == (4, 6), "what was answered is not asked again"
    assert all(headers.get("Authorization") == "Bearer sk-5ec3e7" for headers in model.headers)


def test_figures_are_served_while_it_runs(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", BATCH)
    (port,) = free_ports(1)
    with Loopback(free=2) as model:
        model.hold.clear()
        words = [*COMMAND, "-i", "in.jsonl", "-o", "out.jsonl", "--base-url", model.url, "--metrics-port", str(port)]
        child = subprocess.Popen([sys.executable, *words], cwd=tmp_path)
        client, deadline = Client(f"http://127.0.0.1:{port}"), time.monotonic() + DEADLINE_S
        figures: dict[str, float] = {}
        assert model.held.acquire(timeout=DEADLINE_S)
        assert model.held.acquire(timeout=DEADLINE_S)
        while figures.get("pdserve_batch_lines_total good") != 2:
            assert time.monotonic() < deadline, figures
            figures = {" ".join((one.name, *one.labels.values())): one.value for one in client.metrics()}
        model.hold.set()
        assert child.wait(DEADLINE_S) == 0

    assert figures == {
        "pdserve_batch_file_lines": 4, "pdserve_batch_lines_total good": 2, "pdserve_batch_lines_total error": 0,
        "pdserve_batch_tokens_total prompt": 2, "pdserve_batch_tokens_total completion": 4,
    }  # fmt: skip


def test_a_server_that_serves_another_model_is_refused_before_a_line_is_asked(
    tmp_path: Path, loopback: Loopback
) -> None:
    write(tmp_path / "in.jsonl", BATCH)

    ended: Ended = run(
        tmp_path, *COMMAND, "-i", "in.jsonl", "-o", "out.jsonl", "--base-url", loopback.url, "--model", "other"
    )

    assert ended.status == 2
    assert "--model other" in ended.err
    assert "tiny" in ended.err
    assert loopback.asked == {}


def test_no_torch_is_loaded_to_ask_a_server(tmp_path: Path, loopback: Loopback) -> None:
    write(tmp_path / "in.jsonl", BATCH)
    code = (
        "import sys; from pdserve.cli import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); sys.exit(str(heavy) if heavy else status)"
    )

    ended = run(
        tmp_path, "-P", "-c", code, "run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--base-url", loopback.url
    )

    assert ended.status == 0, ended.err


def test_an_output_whose_url_has_expired_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, loopback: Loopback
) -> None:
    write(tmp_path / "in.jsonl", BATCH)
    target = f"{loopback.url}/out?AWSAccessKeyId=A&Signature=5ec3e7&Expires=1715800091"

    ended = run(tmp_path, *COMMAND, "-i", "in.jsonl", "-o", target, *NO_MODEL, *LOOPBACK)

    assert ended.status == 2
    assert "has expired at 2024-05-15 19:08:11 UTC" in ended.err
    assert "5ec3e7" not in ended.err
