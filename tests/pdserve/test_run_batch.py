"""Part A1 apart from the answers: input and output files, the end of a run, and resuming it."""

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from batch.backend import NO_HEADERS, Answer, BatchBackend
from batch.job import BatchStopped
from pdserve import run_batch
from pdserve.client import Client
from pdserve.ports import free_ports
from telemetry import logs
from tests.cluster.guide import CLONE
from tests.pdserve.batches import (
    BATCH,
    COMMAND,
    CONTENT,
    LOOPBACK,
    NO_MODEL,
    SAID,
    WORDS,
    Ended,
    read,
    request,
    run,
    run_here,
    texts,
    write,
)
from tests.pdserve.loopback import Loopback
from wire.errors import InstanceLost

pytestmark = pytest.mark.cluster

DEADLINE_S = 300.0


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    with Loopback({"/in.jsonl": CONTENT}) as server:
        yield server


@pytest.mark.covers("A1.4")
@pytest.mark.parametrize(
    "typed",
    [("-i", "in.jsonl"), ("-i", "in.jsonl", "-o", "out.jsonl", "--no-such-flag")],
    ids=" ".join,
)
def test_a_wrong_command_line_ends_with_2(tmp_path: Path, typed: tuple[str, ...]) -> None:
    ended = run_here(tmp_path, *typed)

    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("pdserve run-batch: ")


@pytest.mark.covers("A1.4")
def test_a_missing_input_is_reported_before_the_model_is_looked_up(tmp_path: Path) -> None:
    ended = run_here(tmp_path, "-i", "none.jsonl", "-o", "out.jsonl", *NO_MODEL)

    assert ended.status != 0
    assert "none.jsonl" in ended.err
    assert "/no/such/model" not in ended.err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.covers("A1.24")
def test_malformed_lines_end_the_run_before_the_model_is_looked_up(tmp_path: Path) -> None:
    first, second, *_ = map(json.dumps, BATCH)
    nameless = '{"method": "POST", "url": "/v1/completions", "body": {}}'
    write(tmp_path / "in.jsonl", [first, '{"custom_id": "a"', "", nameless, second, first])

    ended = run_here(tmp_path, "-i", "in.jsonl", "-o", "out.jsonl", *NO_MODEL)

    assert ended.status == 2
    assert "nothing was run, because 3 lines cannot be used" in ended.err
    for words in ("  line 2 ", "  line 4 has no custom_id", "  line 6 repeats the custom_id 'id-one' of line 1"):
        assert any(line.startswith(words) for line in ended.err.splitlines()), "each on a line of its own"
    assert "/no/such/model" not in ended.err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.covers("A1.24")
def test_an_empty_file_has_an_empty_output_and_loads_no_model(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n  \n")

    ended = run_here(tmp_path, "-i", "in.jsonl", "-o", "out.jsonl", *NO_MODEL)

    assert (ended.status, (tmp_path / "out.jsonl").read_bytes()) == (0, b""), ended.err


@pytest.mark.often("entrypoints")
@pytest.mark.covers("A1.2", "A1.3")
@pytest.mark.parametrize(
    "words",
    [
        (Path(sys.executable).with_name("pdserve"), "run-batch"),
        ("-m", "pdserve.entrypoints.openai.run_batch"),
        ("-m", "pdserve.endpoints.openai.run_batch"),
    ],
    ids=["script", "entrypoints", "endpoints"],
)
def test_a_folder_with_names_of_our_packages_does_not_matter(
    tmp_path: Path, loopback: Loopback, words: tuple[str | Path, ...]
) -> None:
    write(tmp_path / "in.jsonl", BATCH)

    ended = run(tmp_path, *words, "-i", "in.jsonl", "-o", "out.jsonl", "--base-url", loopback.url)

    assert ended.status == 0, ended.err
    assert texts((tmp_path / "out.jsonl").read_bytes()) == SAID


@pytest.mark.covers("A1.19")
def test_the_version_is_a_valid_python_version(tmp_path: Path) -> None:
    ended = run(tmp_path, "-P", "-c", "import pdserve; print(pdserve.__version__)")

    assert re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?\n", ended.out)


@pytest.mark.covers("A1.20")
def test_the_page_says_that_this_is_not_the_batch_rest_api() -> None:
    page = " ".join((CLONE / "docs" / "batch.md").read_text().split())

    assert "not the Batch REST API" in page


@pytest.mark.long
def test_input_and_output_are_different_files(tmp_path: Path, loopback: Loopback) -> None:
    source, url = write(tmp_path / "in.jsonl", BATCH), f"{loopback.url}/in.jsonl"

    same = run_here(tmp_path, "-i", "in.jsonl", "-o", source, *NO_MODEL)
    same_url = run_here(tmp_path, "-i", f"{url}?a=1", "-o", f"{url}?a=2", *NO_MODEL, *LOOPBACK)

    assert [one.status for one in (same, same_url)] == [2, 2]
    assert source.read_bytes() == CONTENT
    assert loopback.puts == []


def test_errors_are_also_written_to_their_own_file(tmp_path: Path, loopback: Loopback) -> None:
    write(tmp_path / "in.jsonl", [*BATCH, request("bad", "/bad_url")])

    words = ("-i", "in.jsonl", "-o", "out.jsonl", "--error-file", "errors.jsonl")
    ended = run_here(tmp_path, *words, "--base-url", loopback.url)

    assert ended.status == 0, ended.err
    assert [line["custom_id"] for line in read(tmp_path / "errors.jsonl")] == ["bad"]


def test_only_failed_lines_are_retried(tmp_path: Path, loopback: Loopback) -> None:
    write(tmp_path / "in.jsonl", [*BATCH[:3], request("id-four", "/bad_url")])
    words = ("-i", "in.jsonl", "-o", "out.jsonl", "--base-url", loopback.url)
    first = run_here(tmp_path, *words)
    write(tmp_path / "in.jsonl", BATCH)

    again = run_here(tmp_path, *words, "--retry-failed")
    nothing = run_here(tmp_path, "-i", "in.jsonl", "-o", "out.jsonl", *NO_MODEL, "--retry-failed")

    assert first.err.splitlines()[-1] == (
        "the same command with --retry-failed retries the failed lines; a line that was refused (400 to 422) must "
        "be fixed in the input first"
    )
    assert again.out.startswith("4 lines answered (0 errors) in "), again.err
    assert again.out.endswith(", 3 of them by an earlier run: out.jsonl\n")
    assert texts((tmp_path / "out.jsonl").read_bytes()) == SAID
    assert dict(loopback.requests) == dict.fromkeys(WORDS, 1)
    assert nothing.status == 0, f"no model is looked for: {nothing.err}"


@pytest.mark.long
def test_a_foreign_file_in_place_of_the_note_ends_the_run(
    tmp_path: Path,
) -> None:
    write(tmp_path / "in.jsonl", BATCH)
    strange = write(tmp_path / "out.jsonl.asked", ["what I asked"])

    ended = run_here(tmp_path, "-i", "in.jsonl", "-o", "out.jsonl", *NO_MODEL)

    assert ended.status == 2
    assert "out.jsonl.asked is not a pdserve note, or is damaged: remove it, or choose an output other" in ended.err
    assert "/no/such/model" not in ended.err
    assert strange.read_text() == "what I asked\n"


@pytest.mark.long
def test_failed_lines_are_not_retried_on_another_model(tmp_path: Path, loopback: Loopback) -> None:
    write(tmp_path / "in.jsonl", [*BATCH[:3], request("id-four", "/bad_url")])
    words = ("-i", "in.jsonl", "-o", "out.jsonl")
    at_url = (*words, "--base-url", loopback.url)
    run_here(tmp_path, *at_url, "--model", "tiny")
    before = (tmp_path / "out.jsonl").read_bytes()

    other = run_here(tmp_path, *at_url, "--model", "tiny", "--served-model-name", "other", "--retry-failed")
    here = run_here(tmp_path, *words, *NO_MODEL, "--retry-failed")

    assert (other.status, here.status) == (2, 2)
    assert "another run: --served-model-name was (none) and is other now; retry the failed lines with" in other.err
    assert "--model was tiny and is /no/such/model now" in here.err
    assert "or remove out.jsonl.asked to mix both runs' answers" in here.err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert sum(loopback.requests.values()) == 3


@pytest.mark.long
def test_failed_lines_are_not_retried_on_another_served_model(tmp_path: Path, loopback: Loopback) -> None:
    nameless = [{**line, "body": {"prompt": word}} for line, word in zip(BATCH, WORDS, strict=True)]
    write(tmp_path / "in.jsonl", nameless)
    answer = {"status_code": 200, "body": {"model": "m-7b"}}
    write(tmp_path / "out.jsonl", [{"custom_id": "id-one", "response": answer, "error": None}])

    words = ("-i", "in.jsonl", "-o", "out.jsonl", "--base-url", loopback.url, "--retry-failed")
    ended = run_here(tmp_path, *words)

    assert ended.status == 2
    assert "out.jsonl has good answers of the model m-7b, but its failed lines would be answered by tiny" in ended.err
    assert loopback.requests == {}
    assert not (tmp_path / "out.jsonl.journal").exists(), "a run without the flag would continue with its answers"


@pytest.mark.often("15-143")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_prints_how_to_resume_and_resumes(tmp_path: Path, number: signal.Signals, status: int) -> None:
    write(tmp_path / "in.jsonl", BATCH)
    with Loopback(free=2) as model:
        model.hold.clear()
        words = [*COMMAND, "-i", "in.jsonl", "-o", "out.jsonl", "--base-url", model.url, "--max-inflight", "1"]
        words += ["--api-key", "sk-5ec3e7"]
        child = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        assert model.held.acquire(timeout=DEADLINE_S)  # two of four are answered, and this one never will be
        child.send_signal(number)
        _, err = child.communicate(timeout=DEADLINE_S)
        first = sum(model.requests.values())
        there = (tmp_path / "out.jsonl").exists()
        model.hold.set()
        again = run_here(tmp_path, *words[len(COMMAND) :])

    assert (child.returncode, there) == (status, False), err
    message = err.splitlines()
    assert "pdserve run-batch -i in.jsonl -o out.jsonl --base-url" in message[-1]
    assert "sk-5ec3e7" not in err
    assert again.status == 0, again.err
    assert texts((tmp_path / "out.jsonl").read_bytes()) == SAID
    assert (first, sum(model.requests.values())) == (3, 5), "an answered line is not sent again"
    assert all(headers.get("Authorization") == "Bearer sk-5ec3e7" for headers in model.headers)


def test_a_run_with_a_closed_stderr_stops_normally(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", BATCH)
    with Loopback(free=2) as model:
        model.hold.clear()
        words = [*COMMAND, "-i", "in.jsonl", "-o", "out.jsonl", "--base-url", model.url, "--max-inflight", "1"]
        child = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, cwd=tmp_path)
        assert child.stderr is not None
        assert model.held.acquire(timeout=DEADLINE_S)
        child.stderr.close()  # like that of `2>&1 | tee`, which the same Ctrl-C ends
        child.send_signal(signal.SIGINT)

        assert child.wait(DEADLINE_S) == 130
        model.hold.set()
    assert len((tmp_path / "out.jsonl.journal").read_bytes().splitlines()) == 3


def test_metrics_are_served_while_it_runs(tmp_path: Path) -> None:
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


def test_a_server_of_another_model_is_refused_before_any_line(tmp_path: Path, loopback: Loopback) -> None:
    write(tmp_path / "in.jsonl", BATCH)

    ended: Ended = run_here(
        tmp_path, "-i", "in.jsonl", "-o", "out.jsonl", "--base-url", loopback.url, "--model", "other"
    )

    assert ended.status == 2
    assert "the model other is not served" in ended.err
    assert "tiny" in ended.err
    assert loopback.requests == {}


@pytest.mark.long
def test_a_missing_server_or_wrong_key_is_reported_at_once(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", BATCH)
    words = ("-i", "in.jsonl", "-o", "out.jsonl", "--base-url")
    (port,) = free_ports(1)
    with Loopback(key="sk-right") as keyed:
        gone = run_here(tmp_path, *words, f"http://127.0.0.1:{port}")
        wrong = run_here(tmp_path, *words, keyed.url, env={"VLLM_API_KEY": "sk-wrong"})
        right = run_here(tmp_path, *words, keyed.url, env={"VLLM_API_KEY": "sk-right"})

    assert (gone.status, wrong.status, right.status) == (1, 2, 0)
    assert f"http://127.0.0.1:{port}: no connection" in gone.err
    assert "kept" not in gone.err, "nothing was answered"
    assert f"{keyed.url} requires a valid API key" in wrong.err
    assert "sk-wrong" not in wrong.err
    assert keyed.requests == dict.fromkeys(WORDS, 1)


def test_a_foreign_server_answers_no_line_and_replaces_no_output(tmp_path: Path, loopback: Loopback) -> None:
    source, output = write(tmp_path / "in.jsonl", BATCH), write(tmp_path / "out.jsonl", ["of an earlier run"])

    # /somewhere/v1/models is answered 404, as by a file server
    ended = run_here(tmp_path, "-i", source, "-o", output, "--base-url", f"{loopback.url}/somewhere")

    assert ended.status == 2
    assert f"{loopback.url} answers GET /v1/models with status 404" in ended.err
    assert output.read_text() == "of an earlier run\n"
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.jsonl"]
    assert loopback.requests == {}


def test_no_torch_is_loaded_for_a_remote_server(tmp_path: Path, loopback: Loopback) -> None:
    write(tmp_path / "in.jsonl", BATCH)
    code = (
        "import sys; from pdserve.cli import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); sys.exit(str(heavy) if heavy else status)"
    )

    ended = run(
        tmp_path, "-P", "-c", code, "run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--base-url", loopback.url
    )

    assert ended.status == 0, ended.err


@pytest.mark.often("1")
@pytest.mark.parametrize("number", [1, 2])
def test_a_batch_whose_model_is_lost_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source, output = write(tmp_path / "in.jsonl", BATCH), tmp_path / "out.jsonl"
    monkeypatch.setattr(run_batch, "local_model", lambda request: Dying(number))
    monkeypatch.setattr(logs, "configure", lambda *args, **kwargs: None)
    typed = ["-i", str(source), "-o", str(output), "--max-inflight", "1"]

    with pytest.raises(
        BatchStopped, match=f"^the engine is lost; {number} of 4 lines are answered and saved: the same"
    ):
        run_batch.main(typed)
    before = output.exists()
    monkeypatch.setattr(run_batch, "local_model", lambda request: Dying(100))
    status = run_batch.main(typed)

    assert (before, status) == (False, 0)
    assert texts(output.read_bytes()) == SAID


@pytest.mark.long
def test_lines_of_another_model_name_suggest_served_model_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path / "in.jsonl", BATCH), tmp_path / "out.jsonl"
    monkeypatch.setattr(run_batch, "local_model", lambda request: Elsewhere(0))
    monkeypatch.setattr(logs, "configure", lambda *args, **kwargs: None)

    assert run_batch.main(["-i", str(source), "-o", str(output)]) == 0
    first, second, third = capsys.readouterr().err.splitlines()[-3:]
    assert first == "the first error is 'id-one': the model 'tiny' does not exist here; served: a"
    assert second == "--served-model-name NAME gives the model loaded here the name in the lines"
    assert third.startswith("the same command with --retry-failed retries")


def test_misspelt_fields_are_named_once_at_the_end_with_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path / "in.jsonl", BATCH), tmp_path / "out.jsonl"
    monkeypatch.setattr(run_batch, "local_model", lambda request: Misspelt(100))
    monkeypatch.setattr(logs, "configure", lambda *args, **kwargs: None)

    assert run_batch.main(["-i", str(source), "-o", str(output)]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")] == [
        "warning: max_token is not a known field and has no effect: did you mean max_tokens? (4 lines)"
    ]


@pytest.mark.long
def test_a_signal_after_all_answers_suggests_no_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path / "in.jsonl", BATCH), tmp_path / "out.jsonl"
    monkeypatch.setattr(run_batch, "local_model", lambda request: SlowToEnd(100))
    monkeypatch.setattr(logs, "configure", lambda *args, **kwargs: None)

    status = run_batch.main(["-i", str(source), "-o", str(output)])

    captured = capsys.readouterr()
    assert (status, texts(output.read_bytes())) == (0, SAID)
    assert captured.out.startswith("4 lines answered (0 errors)")
    assert "resume with" not in captured.err


class Dying:
    """A model in this process that is lost after a number of answers, with the error of inner_app."""

    def __init__(self, number: int) -> None:
        self._left = number

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[BatchBackend]:
        self._owner = asyncio.current_task()
        try:
            yield self
        except asyncio.CancelledError:
            assert self._owner is not None
            self._owner.uncancel()
            raise InstanceLost("the engine is lost") from None

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        if self._left == 0:
            assert self._owner is not None
            self._owner.cancel()
            await asyncio.sleep(60)
        self._left -= 1
        choice = {"text": f"said {json.loads(body)['prompt']}"}
        return Answer(200, {}, json.dumps({"choices": [choice]}).encode())


class Elsewhere(Dying):
    """A model with another name than that in the lines."""

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        return Answer(404, {}, b'{"error": {"message": "the model \'tiny\' does not exist here; served: a"}}')


class Misspelt(Dying):
    """A model whose requests all have a misspelt field."""

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        words = '199 pdserve "max_token is not a known field and has no effect: did you mean max_tokens?"'
        return replace(await super().send(method, path, body, headers), headers={"warning": words})


class SlowToEnd(Dying):
    """A model that takes long to end, and a user who interrupts it."""

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[BatchBackend]:
        yield self
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)


@pytest.mark.long
def test_a_line_that_hangs_is_an_error_and_the_others_are_answered(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", BATCH)
    with Loopback(free=3) as model:
        model.hold.clear()
        ended = run_here(
            tmp_path, "-i", "in.jsonl", "-o", "out.jsonl", "--base-url", model.url, "--request-timeout", "5"
        )  # fmt: skip

    assert ended.status == 0, ended.err
    assert "4 lines answered (1 error)" in ended.out
    failed = [line for line in read(tmp_path / "out.jsonl") if line["error"] is not None]
    assert [line["error"]["code"] for line in failed] == [504]
    assert failed[0]["error"]["message"] == "no complete answer within 5 s (--request-timeout)"
    assert set(model.requests.values()) == {1}, "it is not sent again"
