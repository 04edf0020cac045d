"""The store compiles once, keeps within its bytes, refuses past its queue, and no grammar harms another."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from llguidance import LLTokenizer

from engine.grammar.cache import OutcomeCache
from engine.grammar.interface import Grammar
from engine.grammar.limits import GrammarLimits
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.store import GrammarStore
from engine.grammar.tokenizer_file import TokenizerFile
from tests.engine.grammar_tools import EOS_ID, allowed_ids, tokenizer_of
from tests.engine.tiny_models import save_tiny_tokenizer
from wire.errors import Draining, InvalidGrammar, NotInstalled, Overloaded
from wire.structured_output import BACKENDS
from wire.types import StructuredOutput

_WAIT_S = 300.0
_LIMITS = GrammarLimits(cpu_s=0.3)
_CPU_BOUND = "start: e\n" + "e: " + " | ".join(f"e e{i}" for i in range(1500)) + " | TXT\n"
_CPU_BOUND += "\n".join(f"e{i}: e e | TXT" for i in range(1500)) + "\nTXT: /[a-z ]/"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(path)
    return path


@pytest.fixture
def store(folder: Path) -> Iterator[GrammarStore]:
    """Yield a store whose compiles may take less than a real one's."""
    with GrammarStore(tokenizer_of(folder), _LIMITS) as made:
        yield made


def _regex(pattern: str, backend: str = "auto") -> StructuredOutput:
    return StructuredOutput("regex", pattern, backend=backend)


def _grammar(future: "Future[Grammar]") -> Grammar:
    return future.result(_WAIT_S)


def test_once_warm_no_tokenizer_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(text: str, **options: Any) -> LLTokenizer:
        made.append(text)
        return LLTokenizer(text, **options)

    monkeypatch.setattr("engine.grammar.llguidance_backend.LLTokenizer", counted)
    with GrammarStore(tokenizer_of(folder), _LIMITS) as store:
        assert store.wait_warm(_WAIT_S)
        assert len(made) == 1
        _grammar(store.prepare(_regex("a")))
        assert len(made) == 1


def test_a_missing_backend_is_the_servers_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine.grammar.llguidance_backend", None)
    with GrammarStore(tokenizer_of(folder), _LIMITS) as store:
        for _ in range(2):
            with pytest.raises(NotInstalled, match="this server lacks llguidance, which structured output needs"):
                _grammar(store.prepare(_regex("a")))


def test_an_unusable_tokenizer_for_grammars_ends_the_wait(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    with GrammarStore(TokenizerFile(str(tmp_path / "tokenizer.json"), (), 8), _LIMITS) as store:
        assert store.wait_warm(_WAIT_S)
        with pytest.raises(InvalidGrammar, match="not possible with this model's tokenizer"):
            _grammar(store.prepare(_regex("a")))


def test_end_ids_unknown_to_the_tokenizer_are_ignored(folder: Path) -> None:
    file = tokenizer_of(folder)

    with GrammarStore(replace(file, eos_token_ids=(EOS_ID, 1 << 20)), _LIMITS) as store:
        assert EOS_ID in allowed_ids(_grammar(store.prepare(_regex("a?"))).matcher())


def test_a_prepared_grammar_is_available_at_once_the_next_time(store: GrammarStore) -> None:
    first = _grammar(store.prepare(_regex("a")))
    again = store.prepare(_regex("a"))

    assert again.done()
    assert again.result() is first
    assert len(allowed_ids(first.matcher((EOS_ID,)))) == 1


def test_equal_grammars_requested_at_once_share_one_compile(store: GrammarStore) -> None:
    futures = [store.prepare(_regex("[a-z]{1,7}")) for _ in range(20)]

    assert len({id(_grammar(future)) for future in futures}) == 1


def test_a_shared_future_cannot_be_cancelled_by_one(store: GrammarStore) -> None:
    future = store.prepare(_regex("[a-z]{1,8}"))

    assert not future.cancel()
    assert _grammar(future)


def test_a_grammar_whose_lexer_is_exhausted_is_compiled_again(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    exhausted = _grammar(store.prepare(_regex("worn")))
    monkeypatch.setattr(CompiledGrammar, "exhausted", property(lambda grammar: grammar is exhausted))

    fresh = _grammar(store.prepare(_regex("worn")))

    assert fresh is not exhausted
    assert store.prepare(_regex("worn")).result(0) is fresh


def test_a_refusal_is_cached_and_raised_again(store: GrammarStore) -> None:
    first = store.prepare(_regex("(?=a)")).exception(_WAIT_S)
    again = store.prepare(_regex("(?=a)"))

    assert again.done()
    assert isinstance(first, InvalidGrammar)
    assert str(again.exception()) == str(first)
    assert again.exception() is not first


def test_obviously_wrong_grammars_cost_no_compile(store: GrammarStore) -> None:
    assert isinstance(store.prepare(StructuredOutput("json", "")).exception(0), InvalidGrammar)


def test_a_grammar_that_ends_the_child_costs_only_itself(store: GrammarStore) -> None:
    before = _grammar(store.prepare(_regex("before")))
    hostile = store.prepare(StructuredOutput("grammar", _CPU_BOUND))
    after = store.prepare(_regex("after"))

    assert store.prepare(_regex("before")).result(0) is before
    assert "of CPU time" in str(hostile.exception(_WAIT_S))
    assert _grammar(after)


def test_a_killed_child_is_replaced_unnoticed(store: GrammarStore) -> None:
    _grammar(store.prepare(_regex("first")))
    pid = store.child_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    assert _grammar(store.prepare(_regex("second")))

    assert store.child_pid() != pid


def test_the_queue_is_bounded(folder: Path) -> None:
    with GrammarStore(tokenizer_of(folder), replace(_LIMITS, queue_length=2)) as store:
        slow = [store.prepare(StructuredOutput("grammar", f"{_CPU_BOUND}\nX{i}: /x/")) for i in range(2)]
        third = store.prepare(_regex("a"))

        assert isinstance(third.exception(0), Overloaded)
        assert all("of CPU time" in str(future.exception(_WAIT_S)) for future in slow)
        assert _grammar(store.prepare(_regex("a")))


def test_a_grammar_that_waited_too_long_is_refused_and_not_kept(folder: Path) -> None:
    now = [0.0]
    with GrammarStore(tokenizer_of(folder), _LIMITS, clock=lambda: now[0]) as store:
        slow = store.prepare(StructuredOutput("grammar", _CPU_BOUND))
        late = store.prepare(_regex("late"))
        now[0] = 31.0

        assert isinstance(late.exception(_WAIT_S), Overloaded)
        assert slow.exception(_WAIT_S)
        assert _grammar(store.prepare(_regex("late")))


def test_closing_refuses_waiting_grammars_and_leaves_no_process(folder: Path) -> None:
    store = GrammarStore(tokenizer_of(folder), _LIMITS)
    _grammar(store.prepare(_regex("a")))
    pid = store.child_pid()
    assert pid is not None
    waiting = [store.prepare(StructuredOutput("grammar", _CPU_BOUND)), store.prepare(_regex("b"))]

    store.close()
    store.close()

    assert not psutil.pid_exists(pid)
    assert all(future.done() for future in waiting)
    assert isinstance(store.prepare(_regex("c")).exception(0), Draining)
    assert not store._thread.is_alive()


def test_old_names_share_one_compile_and_one_notice(store: GrammarStore, caplog: pytest.LogCaptureFixture) -> None:
    made = {_grammar(store.prepare(_regex("o+", name))) for name in BACKENDS}

    assert len(made) == 1
    assert sum("guided_decoding_backend_served_by_llguidance" in line for line in caplog.messages) == 1


def test_the_cache_keeps_the_latest_within_its_bytes(folder: Path) -> None:
    cache = OutcomeCache(10 * 2048)
    for i in range(1000):
        cache.keep(b"%d" % i, "no")
        cache.find(b"0")

    assert len(cache) == 9
    assert cache.num_bytes <= 10 * 2048
    assert cache.find(b"0") == "no"
    assert cache.find(b"999") == "no"
    assert cache.find(b"1") is None


def test_an_outcome_kept_again_is_counted_once() -> None:
    cache = OutcomeCache(10_000)
    for _ in range(5):
        cache.keep(b"a", "no")

    assert (len(cache), cache.num_bytes) == (1, 2050)


_MANY = """
import json, sys
from pathlib import Path
import psutil
from engine.grammar.store import GrammarStore
from tests.engine.grammar_tools import tokenizer_of
from wire.types import StructuredOutput
process = psutil.Process()
with GrammarStore(tokenizer_of(Path(sys.argv[1]))) as store:
    for i in range(3000):
        output = StructuredOutput("json", json.dumps({"properties": {f"p{i}": {"type": "integer"}}}))
        assert store.prepare(output).result(float(sys.argv[2]))
        if i == 1200:
            filled = process.memory_info().rss
    print(process.memory_info().rss - filled)
"""
"""In its own process: memory of other tests must not count for the cache."""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_thousands_of_small_schemas_leave_memory_flat(folder: Path) -> None:
    """GHSA-hf3c-wxg2-49q9: a cache without bounds. RSS may grow while the cache fills, and not afterwards."""
    command = [sys.executable, "-P", "-c", _MANY, str(folder), str(_WAIT_S)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=1100, check=True)
    grown = int(done.stdout)

    assert grown < 16 * 2**20, f"{grown} bytes more after 3,000 schemas than after 1,200"
