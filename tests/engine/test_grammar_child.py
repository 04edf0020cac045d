"""What a compile does to its process stays there: CPU time, memory, a crash, a kill; the next child is warm at once."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine.grammar.child import main
from engine.grammar.compiling_child import CompilingChild
from engine.grammar.limits import MIB, GrammarLimits
from engine.grammar.source import GrammarKind, GrammarSource, read_source
from processes.frames import receive_object, send_object
from tests.engine.grammar_tools import tokenizer_of
from tests.engine.tiny_models import save_tiny_tokenizer
from wire.errors import DeadlineExceeded, InternalError, InvalidGrammar, Unavailable
from wire.types import StructuredOutput

_LIMITS = GrammarLimits()
_EASY = GrammarSource(GrammarKind.REGEX, "a+")
_SLOW = "start: e\n" + "e: " + " | ".join(f"e e{i}" for i in range(1500)) + " | TXT\n"
_SLOW += "\n".join(f"e{i}: e e | TXT" for i in range(1500)) + "\nTXT: /[a-z ]/"
_WAIT_S = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def child(folder: Path) -> Iterator[CompilingChild]:
    """Yield a warm child with the limits of a real one."""
    made = CompilingChild(tokenizer_of(folder), _LIMITS)
    made.start()
    yield made
    made.close()


def test_a_compiled_grammar_and_its_cost_are_returned(child: CompilingChild) -> None:
    compiled = child.compile(_EASY)

    assert "a+" in compiled.form
    assert 0 < compiled.cost_bytes < MIB


def test_the_child_has_no_torch(child: CompilingChild) -> None:
    child.compile(_EASY)

    assert not [entry.path for entry in psutil.Process(child.pid).memory_maps() if "torch" in entry.path]


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "(.{0,1000}){0,1000}", "too many expressions"),
        ("regex", "(?=a)", "look-around"),
        ("regex", r"\1", "backreferences"),
        ("regex", "[", "unclosed character class"),
        ("regex", "(" * 20_000 + "a" + ")" * 20_000, "nest"),
        ("json", '{"type": "nope"}', "Invalid type: nope"),
        ("json", '{"$ref": "#"}', "no text matches the grammar"),
        ("json", '{"type": "string", "pattern": "["}', "unclosed character class"),
        ("json_object", "", None),
        ("grammar", "root ::= root", "no text matches the grammar"),
        ("grammar", "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000, "nested 10000 deep"),
        ("grammar", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "too deeply nested"),
        ("grammar", 'root ::= "a"{0,2147483647}', "2147483647 repetitions"),
        ("regex", "(a+)+b", None),
        ("regex", "a{3,2}\n[", "start must be <= the end|unclosed character class"),
        ("grammar", 'start: e\ne: "a" f', r'as Lark: at 2\(4\): unknown name: "f"; as EBNF: line 1'),
    ],
)
def test_hostile_grammars_are_refused_or_harmless(
    child: CompilingChild, kind: str, value: str, words: str | None
) -> None:
    pid = child.pid
    source = read_source(StructuredOutput(kind, value), _LIMITS)

    if words is None:
        assert child.compile(source).form
    else:
        with pytest.raises(InvalidGrammar, match=words) as refused:
            child.compile(source)
        assert len(str(refused.value).splitlines()) == 1

    assert child.pid == pid, "a refusal with a message needs no new process"


def test_the_limit_of_cpu_time_ends_the_child_and_the_next_is_warm(folder: Path) -> None:
    child = CompilingChild(tokenizer_of(folder), replace(_LIMITS, cpu_s=0.5))
    child.start()
    pid = child.pid

    with pytest.raises(InvalidGrammar, match=r"takes more than 0\.5 s of CPU time, the limit"):
        child.compile(read_source(StructuredOutput("grammar", _SLOW), _LIMITS))

    assert child.pid not in (None, pid)
    assert child.compile(_EASY).form
    child.close()


def test_a_child_killed_from_outside_is_replaced_and_retried(child: CompilingChild) -> None:
    child.compile(_EASY)
    pid = child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    assert child.compile(_EASY).form

    assert child.pid != pid


def test_memory_above_idle_is_bounded(folder: Path) -> None:
    made = CompilingChild(tokenizer_of(folder), replace(_LIMITS, memory_bytes=4 * MIB))
    choices = [f"{i:07d}" for i in range(4000)]

    try:
        with pytest.raises(InvalidGrammar, match="takes more than 4 MB of memory, the limit"):
            made.compile(GrammarSource(GrammarKind.CHOICE, json.dumps(choices * 20)))
        assert made.compile(_EASY).form
    finally:
        made.close()


def test_a_form_larger_than_the_cache_is_refused(folder: Path) -> None:
    made = CompilingChild(tokenizer_of(folder), replace(_LIMITS, cache_bytes=50))

    try:
        with pytest.raises(InvalidGrammar, match=r"in memory has \d+ bytes, but the limit is 50"):
            made.compile(_EASY)
    finally:
        made.close()


def test_a_crash_is_reported_by_its_signal(folder: Path) -> None:
    made = CompilingChild(tokenizer_of(folder), _LIMITS)
    try:
        made.compile(_EASY)
        assert made.pid is not None
        os.kill(made.pid, signal.SIGSEGV)

        with pytest.raises(InvalidGrammar, match=r"crashes the llguidance compiler \(SIGSEGV\)"):
            made.compile(_EASY)
        assert made.compile(_EASY).form
    finally:
        made.close()


def test_a_child_that_does_not_answer_is_replaced(folder: Path) -> None:
    made = CompilingChild(tokenizer_of(folder), replace(_LIMITS, start_s=0.2))
    made.start()
    pid = made.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    with pytest.raises(DeadlineExceeded, match=r"starting the grammar compiler took longer than 0\.2 s"):
        made.compile(_EASY)

    assert not psutil.pid_exists(pid)
    assert made.pid not in (None, pid)
    made.close()


def test_a_child_that_sends_nonsense_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CompilingChild(tokenizer_of(folder), _LIMITS)
    made.start()
    pid = made.pid

    def no_message(connection: socket.socket, max_bytes: int) -> None:
        raise ValueError("a message must be an object")

    with monkeypatch.context() as patched:
        patched.setattr("engine.grammar.compiling_child.receive_object", no_message)
        with pytest.raises(InternalError, match="a message must be an object"):
            made.compile(_EASY)

    assert made.pid not in (None, pid)
    assert made.compile(_EASY).form
    made.close()


def test_a_child_that_cannot_start_gives_the_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    made = CompilingChild(tokenizer_of(folder), _LIMITS)

    with pytest.raises(Unavailable, match="failed to start"):
        made.compile(_EASY)

    made.close()


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    made = CompilingChild(tokenizer_of(tmp_path), _LIMITS)

    with pytest.raises(InvalidGrammar, match=r"needs the model's tokenizer\.json"):
        made.compile(_EASY)

    made.close()


def test_a_child_dies_with_its_parent(folder: Path) -> None:
    """Even when the parent is killed and can close nothing."""
    code = (
        "import sys, time\n"
        "from engine.grammar.compiling_child import CompilingChild\n"
        "from engine.grammar.limits import GrammarLimits\n"
        "from engine.grammar.source import GrammarKind, GrammarSource\n"
        "from engine.grammar.tokenizer_file import TokenizerFile\n"
        "child = CompilingChild(TokenizerFile(sys.argv[1], (2,), 333), GrammarLimits())\n"
        "child.compile(GrammarSource(GrammarKind.REGEX, 'a'))\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-P", "-c", code, str(folder / "tokenizer.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()

        child.wait(_WAIT_S)


def test_the_same_loop_serves_in_any_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's loop without a process, so that its refusals can be read line by line."""
    monkeypatch.setattr("engine.grammar.child._bound_memory", lambda limits: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    ours, theirs = socket.socketpair()
    with ours:
        tokenizer = tokenizer_of(folder)
        limits = {"cpu_s": 100.0, "form_bytes": 10}
        send_object(ours, {"tokenizer": tokenizer.to_json(), "limits": limits})
        send_object(ours, {"kind": "regex", "text": "a", "whitespace": None})
        send_object(ours, {"kind": "regex", "text": "[", "whitespace": None})
        ours.shutdown(socket.SHUT_WR)
        monkeypatch.setattr(signal, "signal", lambda number, handler: None)
        main(theirs.detach())

        assert receive_object(ours, MIB) == {"ready": True}
        answer = receive_object(ours, MIB)
        assert answer is not None
        assert "compiled text has" in answer["refused"]
        answer = receive_object(ours, MIB)
        assert answer is not None
        assert "unclosed character class" in answer["refused"]
        assert receive_object(ours, MIB) is None
