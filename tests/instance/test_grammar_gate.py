"""A prompt with structured output waits for its grammar, and then continues, is refused or is cancelled."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.grammar.interface import Grammar
from engine.grammar.limits import GrammarLimits
from engine.grammar.store import GrammarStore
from engine.grammar.tokenizer_file import TokenizerFile
from instance.grammar_gate import GrammarGate
from instance.session import InstanceSession
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_tokenizer
from tests.instance.session_runs import WAIT_S, next_event, run_session
from wire.errors import InvalidRequest, PdserveError
from wire.messages import Cancel, Failed, Generate, Prefill, Refused, Reserve
from wire.types import PromptState, SamplingParams, StructuredOutput, Ticket

_CPU_BOUND = "start: e\n" + "e: " + " | ".join(f"e e{i}" for i in range(1500)) + " | TXT\n"
_CPU_BOUND += "\n".join(f"e{i}: e e | TXT" for i in range(1500)) + "\nTXT: /[a-z ]/"
_TICKET = Ticket("0" * 32, 1, "decode-0", 3, 0, 10.0, ())


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarStore]:
    """Yield a store with small limits for a compile."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    tokenizer = TokenizerFile(str(folder / "tokenizer.json"), (2,), VOCAB_SIZE)
    with GrammarStore(tokenizer, GrammarLimits(cpu_s=0.5)) as store:
        yield store


def _prompt(prompt_id: str, option: StructuredOutput | None) -> PromptState:
    return PromptState(prompt_id, "r", (1, 2, 3), SamplingParams(max_tokens=4, structured=option))


def _regex(pattern: str) -> StructuredOutput:
    return StructuredOutput("regex", pattern)


class _Halves:
    """Both halves, which record what they are given."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str, Grammar | None]] = []
        self.cancelled: list[str] = []
        self.prefill = SimpleNamespace(
            accept=lambda owner, state, ticket, grammar: self._take("prefill", state, grammar)
        )
        self.decode = SimpleNamespace(
            reserve=lambda owner, state, grammar: self._take("reserve", state, grammar),
            generate=lambda owner, state, grammar: self._take("generate", state, grammar),
        )

    def cancel(self, owner: InstanceSession, command: Cancel) -> None:
        self.cancelled.append(command.prompt_id)

    def _take(self, what: str, state: PromptState, grammar: Grammar | None) -> None:
        self.taken.append((what, state.prompt_id, grammar))


def _run(test: Callable[[Any, _Halves], Awaitable[None]], grammars: GrammarStore | None) -> None:
    halves = _Halves()
    run_session(lambda session: test(session, halves), halves, grammars=grammars)


async def _settled(grammars: GrammarStore, option: StructuredOutput, gate: GrammarGate) -> None:
    """Wait until the specification has its grammar and all callbacks have run, which is a little later."""
    await asyncio.wait([asyncio.wrap_future(grammars.prepare(option))])
    while gate._gate._waiting:  # noqa: ASYNC110 - no event reports it
        await asyncio.sleep(0)


def test_each_command_continues_with_its_grammar(grammars: GrammarStore) -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        option = _regex("a{1,3}")
        for command in (
            Reserve(_prompt("r", option)),
            Prefill(_prompt("p", option), _TICKET),
            Generate(_prompt("g", option)),
        ):
            session.handle(command)
        await _settled(grammars, option, session._gate)

        made = grammars.prepare(option).result(0)
        assert halves.taken == [("reserve", "r", made), ("prefill", "p", made), ("generate", "g", made)]

    _run(test, grammars)


def test_a_prompt_without_a_grammar_continues_at_once(grammars: GrammarStore) -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        session.handle(Generate(_prompt("slow", _regex("b{1,3}"))))
        session.handle(Generate(_prompt("plain", None)))

        assert halves.taken == [("generate", "plain", None)]

    _run(test, grammars)


def test_a_hostile_grammar_costs_only_its_own_request(grammars: GrammarStore) -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        session.handle(Reserve(_prompt("bad", StructuredOutput("grammar", _CPU_BOUND))))
        session.handle(Generate(_prompt("plain", None)))
        session.handle(Generate(_prompt("good", _regex("c"))))

        refused = await next_event(session)
        await _settled(grammars, _regex("c"), session._gate)
        assert isinstance(refused, Refused)
        assert (refused.prompt_id, refused.error) == ("bad", "InvalidGrammar")
        assert "of CPU time, the limit" in refused.message
        assert [prompt_id for _, prompt_id, _ in halves.taken] == ["plain", "good"]

    _run(test, grammars)


@pytest.mark.parametrize(
    "option",
    [
        StructuredOutput("json", ""),
        StructuredOutput("json", json.dumps({"$ref": "http://x"})),
        StructuredOutput("regex", "a", backend="jsonformer"),
    ],
)
def test_an_invalid_specification_is_refused_at_once(grammars: GrammarStore, option: StructuredOutput) -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        session.handle(Prefill(_prompt("bad", option), _TICKET))

        refused = await next_event(session)
        assert isinstance(refused, Refused)
        assert refused.error == "InvalidGrammar"
        assert halves.taken == []

    _run(test, grammars)


def test_without_a_store_structured_output_is_refused() -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        session.handle(Generate(_prompt("g", _regex("a"))))

        refused = await next_event(session)
        assert isinstance(refused, Refused)
        assert "not possible here" in refused.message
        assert halves.taken == []

    _run(test, None)


def test_a_prompt_cancelled_while_its_grammar_is_compiled_ends_once(grammars: GrammarStore) -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        option = _regex("d{1,3}")
        session.handle(Generate(_prompt("g", option)))
        session.handle(Cancel("g", None, "enough"))
        session.handle(Cancel("g", None, "enough"))

        failed = await next_event(session)
        await _settled(grammars, option, session._gate)
        assert failed == Failed("g", "Cancelled", "enough")
        assert halves.taken == []
        assert halves.cancelled == ["g"], "the second cancel goes to the halves, which ignore an unknown prompt"

    _run(test, grammars)


def test_a_lost_session_passes_on_no_prompt(grammars: GrammarStore) -> None:
    async def test(session: InstanceSession, halves: _Halves) -> None:
        option = _regex("e{1,3}")
        session.handle(Generate(_prompt("g", option)))
        session.lost()
        await _settled(grammars, option, session._gate)

        assert halves.taken == []

    _run(test, grammars)


def test_a_prompt_waiting_for_its_grammar_is_not_accepted_twice(grammars: GrammarStore) -> None:
    async def run() -> None:
        gate = GrammarGate(grammars, asyncio.get_running_loop())
        state = _prompt("g", _regex("f{1,3}"))
        refusals: list[PdserveError] = []
        gate.submit(state, lambda _: None, refusals.append)

        with pytest.raises(InvalidRequest, match="prompt g is already waiting for its grammar"):
            gate.submit(state, lambda _: None, refusals.append)

        assert gate.drop("g")
        assert not gate.drop("g")
        await _settled(grammars, _regex("f{1,3}"), gate)
        assert refusals == []

    asyncio.run(run())


def test_the_store_is_made_from_the_model_folder(tmp_path: Path) -> None:
    from instance.grammars import make_grammars

    options = SimpleNamespace(model=str(tmp_path), engine="torch")
    config: Any = SimpleNamespace(options=options)
    info: Any = SimpleNamespace(eos_token_ids=(2,), vocab_size=VOCAB_SIZE, generates=True)

    assert make_grammars(config, info) is None
    save_tiny_tokenizer(tmp_path)
    store = make_grammars(config, info)
    assert store is not None
    with store:
        assert store.prepare(_regex("a")).result(WAIT_S)
    options.engine = "fake"
    assert make_grammars(config, info) is None
    options.engine, info.generates = "torch", False
    assert make_grammars(config, info) is None
