"""`pdserve bench serve` starts its errors with its name, and gives advice if no server listens."""

import pytest

from pdserve.cli import main
from tests.pdserve.quiet_server import QuietHandler, serving

HINT = "`pdserve up --detach` starts a cluster on this machine"
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def signals_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.bench.serve.unwind_on_sigterm", lambda: None)


def failed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the line of the error that ends the command."""
    assert main(["bench", "serve", "--disable-tqdm", *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_refused_connection_suggests_how_to_start_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    line = failed(capsys, "--base-url", NOWHERE)

    silent = f"{NOWHERE}/v1/models does not answer: no connection: Connection refused"
    assert line == f"pdserve bench serve: {silent}; {HINT}"


def test_a_missing_server_gets_the_advice_after_the_wait(capsys: pytest.CaptureFixture[str]) -> None:
    line = failed(capsys, "--base-url", NOWHERE, "--ready-check-timeout-sec", "1")

    assert line.endswith(f"no connection: Connection refused (--ready-check-timeout-sec 1); {HINT}")


def test_a_load_without_any_connection_suggests_a_cluster_too(capsys: pytest.CaptureFixture[str]) -> None:
    line = failed(capsys, "--base-url", NOWHERE, "--model", "m", "--vocab-size", "900", "--num-prompts", "2")

    measured = f"nothing was measured: none of the 2 requests to {NOWHERE} completed"
    assert line == f"pdserve bench serve: {measured}; {HINT}"


def test_a_failing_server_gets_no_advice_to_start_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    class Refusing(QuietHandler):
        def do_GET(self) -> None:
            self.answer(404, b'{"error": {"message": "no such route"}}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(500, b'{"error": {"message": "broken"}}')

    with serving(Refusing) as url:
        unnamed = failed(capsys, "--base-url", url)
        named = failed(capsys, "--base-url", url, "--model", "m", "--vocab-size", "900", "--num-prompts", "2")

    assert unnamed == f"pdserve bench serve: {url}/v1/models returned HTTP 404: no such route"
    assert named.endswith(f"none of the 2 requests to {url} completed")


@pytest.mark.parametrize(
    ("argv", "begins"),
    [
        (["bench", "serve", "--num-prompts", "0"], "pdserve bench serve: "),
        (["bench", "engine", "--repeats", "0"], "pdserve bench engine: "),
        (["bench", "--nosuch"], "pdserve bench: there is no benchmark "),
    ],
)
def test_errors_are_prefixed_with_the_benchmarks_name(
    argv: list[str], begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2

    assert capsys.readouterr().err.startswith(begins)
