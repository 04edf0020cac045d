"""`pdserve chat` and `pdserve complete` against a server that repeats each prompt."""

import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pdserve import chat, complete
from pdserve.cli import main
from pdserve.run_folder import ClusterState, ProcessRecord, RunFolder, start_time
from tests.pdserve.quiet_server import QuietHandler, serving
from wire.errors import ConfigError, Unavailable


@dataclass
class Recorded:
    """The server's URL and the requests it received."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Serve one model, `m`, to clients with the key `sk`, below /proxy."""
    for name in ("PDSERVE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    server = Recorded()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            may = self.headers.get("Authorization") == "Bearer sk" and self.path == "/proxy/v1/models"
            self.answer(200 if may else 401, b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
            if prompt == "fail":
                return self.answer(400, b'{"error": {"message": "it is too long"}}')
            texts = ("you said ", prompt)
            choices = [{"delta": {"content": text}} if "messages" in body else {"text": text} for text in texts]
            events: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
            if prompt == "think":
                thoughts = [{"reasoning": "Hm", "reasoning_content": "Hm"}, {"reasoning_content": ".\x1b[2J"}]
                events[:0] = [{"choices": [{"delta": delta}]} for delta in thoughts]
            if prompt == "break":
                events[1] = {"error": {"message": "the instance is gone"}}
            lines = b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in (*events, {"choices": []}))
            return self.answer(200, lines + b"data: [DONE]\n\n")

    with serving(Handler) as url:
        server.url = f"{url}/proxy/v1"
        yield server


def _flags(server: Recorded, *more: str) -> list[str]:
    return ["--url", server.url, "--api-key", "sk", *more]


def test_a_chat_keeps_its_history(
    server: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\nfail\ntwo\n"))

    assert chat.main(_flags(server, "--system-prompt", "be brief")) == 0

    reported = capsys.readouterr()
    assert reported.out == "you said one\nyou said two\n"
    assert reported.err == "HTTP 400: it is too long\n"
    system, one = {"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}
    answer, two = {"role": "assistant", "content": "you said one"}, {"role": "user", "content": "two"}
    assert server.bodies[0] == {"model": "m", "messages": [system, one], "stream": True}
    assert server.bodies[-1]["messages"] == [system, one, answer, two]
    assert server.headers[-1]["Authorization"] == "Bearer sk"


def test_texts_are_continued_without_history(
    server: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo"))

    assert complete.main(_flags(server, "--max-tokens", "9", "--model-name", "other")) == 0

    assert capsys.readouterr().out == "you said one\nyou said two\n"
    assert server.bodies == [
        {"model": "other", "prompt": text, "max_tokens": 9, "stream": True} for text in ("one", "two")
    ]


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_limit_and_temperature_are_sent_only_if_given(server: Recorded, command: str) -> None:
    assert main([command, *_flags(server, "-q", "hi", "--max-tokens", "9", "--temperature", "0")]) == 0
    assert main([command, *_flags(server, "-q", "hi")]) == 0

    typed, not_typed = server.bodies
    assert (typed["max_tokens"], typed["temperature"]) == (9, 0.0)
    assert not {"max_tokens", "temperature"} & not_typed.keys()


@pytest.mark.parametrize(
    ("command", "message"), [("chat", "the rest of the context"), ("complete", "the server's; pdserve's is 16")]
)
def test_help_describes_the_limit_of_an_answer(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])

    assert message in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_without_a_url_the_run_folders_cluster_is_used(
    server: Recorded, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_RUN_DIR", str(tmp_path))
    watcher = ProcessRecord("supervisor", "supervisor", os.getpid(), start_time(os.getpid()) or 0, "", "/l")
    RunFolder(tmp_path).write(ClusterState(server.url.removesuffix("/v1"), "m", (), watcher))

    assert main([command, "--api-key", "sk", "-q", "hi"]) == 0

    assert len(server.bodies) == 1


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_quick_question_is_sent_once_and_its_error_ends_the_command(
    server: Recorded, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *_flags(server, "-q", "hi")]) == 0
    assert capsys.readouterr().out == "you said hi\n"

    assert main([command, *_flags(server, "-q", "fail")]) == 1
    assert capsys.readouterr().err == f"pdserve {command}: HTTP 400: it is too long\n"


def test_a_terminal_has_a_prompt_and_gets_no_escapes_of_a_model(
    server: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["a\x1b[2Jb"])

    def ask(prompt: str) -> str:
        assert prompt == "> "
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    assert complete.main(_flags(server)) == 0

    assert capsys.readouterr().out == "you said a\N{REPLACEMENT CHARACTER}[2Jb\n\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_shows_the_thinking_dimmed(
    server: Recorded, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)

    assert chat.main(_flags(server, "-q", "think")) == 0

    thoughts = "\x1b[2mHm.\N{REPLACEMENT CHARACTER}[2J\x1b[0m\n\n" if is_terminal else ""
    assert capsys.readouterr().out == f"{thoughts}you said think\n"


@pytest.mark.parametrize(
    ("argv", "error", "words"),
    [
        (["--url", "localhost:9000"], ConfigError, "--url localhost:9000: use http://HOST:PORT"),
        (["--url", "http://127.0.0.1:1"], Unavailable, "http://127.0.0.1:1 does not answer: Connection refused"),
        (["--base-url", "http://127.0.0.1:1"], Unavailable, "http://127.0.0.1:1 does not answer: Connection refused"),
        (["--url", "http://127.0.0.1:1"], Unavailable, "; `pdserve up --detach` starts a cluster on this machine$"),
        (
            ["--url", "http://127.0.0.1:1", "--model-name", "m"],
            Unavailable,
            "1 does not answer: Connection refused; `pd",
        ),
        (["--max-tokens", "0"], ConfigError, "--max-tokens 0: must be at least 1"),
        (["--temperature", "-0.5"], ConfigError, "--temperature -0.5: must be 0 or more"),
        (["--temperature", "nan"], ConfigError, "--temperature nan: must be 0 or more"),
        (["--temperature", "inf"], ConfigError, "--temperature inf: must be 0 or more"),
    ],
)
@pytest.mark.parametrize("command", [chat, complete])
def test_mistakes_are_reported(argv: list[str], error: type[Exception], words: str, command: ModuleType) -> None:
    with pytest.raises(error, match=words):
        command.main([*argv, "-q", "x"])


def test_a_refused_key_and_another_server_are_reported(server: Recorded) -> None:
    with pytest.raises(ConfigError, match="requires a valid API key: set --api-key or PDSERVE_API_KEY"):
        chat.main(["--url", server.url, "-q", "x"])
    with pytest.raises(ConfigError, match="requires a valid API key"):
        chat.main(["--url", server.url.removesuffix("/proxy/v1"), "--api-key", "sk", "-q", "x"])


def test_an_interrupted_quick_question_ends_its_line(
    server: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(text: str) -> str:
        if text == "hi":
            raise KeyboardInterrupt
        return text

    monkeypatch.setattr("pdserve.prompt_command._printable", interrupted)

    assert main(["chat", *_flags(server, "-q", "hi")]) == 130

    assert capsys.readouterr().out == "you said \n"


@pytest.mark.parametrize("quick", [True, False])
def test_a_failing_answer_ends_its_line_before_the_error(
    server: Recorded, quick: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("break\n"))

    assert main(["chat", *_flags(server, *(["-q", "break"] if quick else []))]) == quick

    reported = capsys.readouterr()
    assert reported.out == "you said \n"
    assert reported.err == ("pdserve chat: " if quick else "") + "the instance is gone\n"


def test_ctrl_c_ends_an_answer_and_keeps_its_text(
    server: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(text: str) -> str:
        if text == "stop":
            raise KeyboardInterrupt
        return text

    monkeypatch.setattr("pdserve.prompt_command._printable", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("stop\nmore\n"))

    assert chat.main(_flags(server)) == 0

    assert capsys.readouterr().out == "you said \nyou said more\n"
    assert server.bodies[-1]["messages"][1] == {"role": "assistant", "content": "you said stop"}
