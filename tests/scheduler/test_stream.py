"""From events to pieces: the tokens of a piece, the logprob of a choice, and which choices the client gets."""

from collections.abc import Sequence
from typing import Any

import pytest

from scheduler.observability.request_done import RequestDone
from scheduler.request import GenerationRequest, PromptDone, TokenSink
from scheduler.request_class import UNCLASSED, RequestClass
from scheduler.text.best_of import BestOf
from scheduler.text.pieces import TextOptions, TextPiece
from scheduler.text_output import TextOutput
from scheduler.tokens import Tokens
from tests.scheduler.virtual_time import virtual
from wire.types import FinishReason, SamplingParams, StageTimes, TokenLogprobs, TokenOutput


class Quiet:
    """An observer that ignores everything."""

    def first_token_came(self, request: GenerationRequest, seconds: float) -> None: ...

    def choice_started(self) -> None: ...

    def token_gap(self, seconds: float) -> None: ...

    def prompt_done(self, done: PromptDone) -> None: ...

    def request_done(self, done: RequestDone) -> None: ...


Script = Sequence[tuple[int, TokenOutput] | PromptDone | list[TokenLogprobs | None]]
"""Tokens with their prompt, reports, and log probabilities of prompt 0."""


class Scripted:
    """A dispatcher that passes a script to the sink."""

    def __init__(self, script: Script) -> None:
        self.started: list[GenerationRequest] = []
        self.stopped: list[tuple[int, int]] = []
        self._script = script

    def check_room(self, tenant: str, request_class: RequestClass = UNCLASSED) -> None:
        """There is always room."""

    async def run(self, request: GenerationRequest, sink: TokenSink) -> None:
        self.started.append(request)
        for item in self._script:
            if isinstance(item, PromptDone):
                sink.prompt_done(item)
            elif isinstance(item, list):
                sink.prompt_logprobs(0, item)
            else:
                prompt, token = item
                key = (prompt, token.sequence)
                if not sink.emit(prompt, token) and token.finish is None and key not in self.stopped:
                    self.stopped.append(key)


def outputs_of(
    tokens: Tokens, sequence: int, text: str, *, prompt: int = 0, logprob: float | None = None
) -> list[tuple[int, TokenOutput]]:
    """The tokens of a sequence with this text, which finishes by length; each has this log probability."""
    ids = tokens._encode(text, False)
    logprobs = None if logprob is None else TokenLogprobs(logprob, 1)
    outputs = [TokenOutput("", sequence, i, token_id, logprobs=logprobs) for i, token_id in enumerate(ids)]
    outputs[-1].finish = FinishReason.LENGTH
    return [(prompt, output) for output in outputs]


def done(prompt: int = 0) -> PromptDone:
    return PromptDone(prompt, "local", "", None, None, StageTimes())


async def run(
    tokens: Tokens, script: Script, options: TextOptions | None = None, *, prompts: int = 1, **params: Any
) -> tuple[list[TextPiece], TextOutput, Scripted]:
    request = GenerationRequest("r", ((1, 2),) * prompts, SamplingParams(**{"max_tokens": 99, **params}), 30.0, 10.0)
    stream, dispatcher = TextOutput(request, options or TextOptions(), tokens, Quiet()), Scripted(script)
    pieces: list[TextPiece] = []
    await stream.run(dispatcher.run, pieces.append)
    return pieces, stream, dispatcher


def texts(pieces: Sequence[TextPiece]) -> dict[int, str]:
    by_index: dict[int, str] = {}
    for piece in pieces:
        by_index[piece.index] = by_index.get(piece.index, "") + piece.text
    return by_index


@virtual
async def test_every_token_is_emitted_with_the_first_text_after_it(tokens: Tokens) -> None:
    events = outputs_of(tokens, 0, "你好 again", logprob=-0.5)

    pieces, _, _ = await run(tokens, [*events, done()])

    assert [event for piece in pieces for event in piece.tokens] == [token for _, token in events]
    assert texts(pieces) == {0: "你好 again"}
    assert pieces[-1].cumulative_logprob == pytest.approx(-0.5 * len(events))
    assert len(pieces[0].tokens) > 1, "the tokens of one character come with it"


@virtual
async def test_tokens_after_a_stop_string_are_not_counted(tokens: Tokens) -> None:
    events = outputs_of(tokens, 0, "one two three", logprob=-1.0)

    pieces, stream, script = await run(tokens, [*events, done()], TextOptions(stops=("two",)))

    assert texts(pieces) == {0: "one "}
    assert script.stopped == [(0, 0)]
    carried = [event for piece in pieces for event in piece.tokens]
    assert carried == [token for _, token in events[: len(carried)]]
    assert stream.num_output_tokens == len(carried) < len(events)
    assert pieces[-1].cumulative_logprob == pytest.approx(-len(carried))


@virtual
async def test_the_best_sequences_are_renumbered_and_all_are_counted(tokens: Tokens) -> None:
    words = {0: ("good", -0.4), 1: ("best", -0.1), 2: ("worst", -9.0), 3: ("fine", -0.2)}
    events = [event for sequence, (word, p) in words.items() for event in outputs_of(tokens, sequence, word, logprob=p)]
    sums = {word: p * len(tokens._encode(word, False)) for word, p in words.values()}

    pieces, stream, script = await run(tokens, [*events, done()], n=2, best_of=4)

    first, second = sorted(sums, key=lambda word: -sums[word])[:2]
    assert texts(pieces) == {0: first, 1: second}
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length", "length"]
    assert stream.num_output_tokens == len(events)
    assert [request.params.logprobs for request in script.started] == [0]


@virtual
async def test_each_prompt_has_its_own_best(tokens: Tokens) -> None:
    events = [
        *outputs_of(tokens, 0, "a", prompt=1, logprob=-3.0), *outputs_of(tokens, 0, "b", prompt=0, logprob=-1.0),
        *outputs_of(tokens, 1, "c", prompt=0, logprob=-1.0), *outputs_of(tokens, 1, "d", prompt=1, logprob=-2.0),
    ]  # fmt: skip

    pieces, _, _ = await run(tokens, [*events, done(0), done(1)], prompts=2, best_of=2, logprobs=3)

    assert texts(pieces) == {0: "b", 1: "d"}  # of two equal ones the first


@virtual
async def test_no_logprobs_are_requested_where_all_sequences_are_wanted(tokens: Tokens) -> None:
    pieces, _, script = await run(tokens, [*outputs_of(tokens, 0, "a"), *outputs_of(tokens, 1, "b"), done()], n=2)

    assert {piece.cumulative_logprob for piece in pieces} == {None}
    assert [request.params.logprobs for request in script.started] == [None]


@virtual
async def test_a_prompt_is_scored_and_echoed_before_its_outputs(tokens: Tokens) -> None:
    scored: list[TokenLogprobs | None] = [None, TokenLogprobs(-1.0, 2)]
    parts = [scored[:1], scored[1:]]

    pieces, stream, _ = await run(tokens, [*parts, *outputs_of(tokens, 0, " b"), done()], TextOptions(echo=("a",)))

    assert stream.scored == [scored]
    assert texts(pieces) == {0: "a b"}
    assert pieces[0].text.startswith("a")


def test_a_sequence_without_a_known_logprob_ranks_last() -> None:
    chosen = BestOf(1, 2, first_index=5)

    assert chosen.add(0, TextPiece(0, "unknown", "stop")) == []
    (best,) = chosen.add(1, TextPiece(1, "known", "stop", cumulative_logprob=-1e9))
    assert (best.index, best.text) == (5, "known")
