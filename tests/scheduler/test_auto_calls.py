"""What may go wrong with calls that a model decides on, in every format, whole and streamed."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from scheduler.api.tool_calls import call_options
from scheduler.model.files import read_model_files
from scheduler.observability.metrics import Metrics
from scheduler.text.pieces import TextOptions, TextPiece
from scheduler.text_output import TextOutput
from scheduler.tokens import Tokens
from scheduler.tools.choice import ChoiceMode, ToolChoice
from scheduler.tools.deltas import joined
from scheduler.tools.parsers.harmony import MARKERS
from scheduler.tools.parsers.registry import CALL_FORMATS
from simulation import prompt as simulated_prompt
from tests.scheduler.fake_cluster import request
from tests.scheduler.test_retries import PROMPT, linked
from tests.scheduler.test_tool_calls import NOW, answers, shown
from tests.scheduler.test_tool_history import TOOL
from tests.scheduler.tool_calls_by_vllm import FORMATS as BY_VLLM
from tests.scheduler.tool_calls_by_vllm import Format
from tests.scheduler.virtual_time import virtual
from wire.types import TokenOutput

over_http = pytest.mark.usefixtures("one_renderer")


def _write_harmony(_: random.Random, calls: Sequence[tuple[str, Any]]) -> str:
    begun = "<|channel|>commentary to=functions."
    one = "{} <|constrain|>json<|message|>{}<|call|>".format
    return "<|start|>assistant".join(begun + one(name, json.dumps(arguments)) for name, arguments in calls)


FORMATS = BY_VLLM | {"openai": Format("openai", _write_harmony, (), MARKERS, starts=True)}
AUTO = {"tools": [TOOL, NOW]}
CALLS = [("weather", {"city": "Paris"}), ("now", {})]
BEGUN = {
    "llama3_json": "x <|python_t", "mistral": "x [TOOL_CA", "mistral_v11": "x [TOOL_CA", "pythonic": "x <|python_sta",
    "llama4_pythonic": "x <|python_sta", "deepseek_v3": "x <｜tool▁ca", "deepseek_v31": "x <｜tool▁ca",
    "kimi_k2": "x <|tool_ca",
}  # fmt: skip
"""Content that ends with the beginning of a marker."""


@pytest.fixture
def special(make_model: Any, request: pytest.FixtureRequest) -> Path:
    """Return a model whose special tokens are the markers of the format `name`."""
    folder: Path = make_model()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    markers = FORMATS[request.node.callspec.params["name"]].markers
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def written(name: str, before: str = "Look. ") -> str:
    """Return content and two calls, or only the calls where a format has them at the start."""
    calls = FORMATS[name].write(random.Random(4), CALLS)
    return calls if FORMATS[name].starts else before + calls


def calls_of(choice: Any) -> list[tuple[str, str]]:
    """Return names and arguments without white space, which the JSON of a format may have."""
    called = [call["function"] for call in choice["message"].get("tool_calls", ())]
    return [(one["name"], one["arguments"].replace(" ", "").replace("\n", "")) for one in called]


EXPECTED = [("weather", '{"city":"Paris"}'), ("now", "{}")]


@pytest.mark.covers("B.tools.2", "B.tools.3", "B.tools.12", "B.tools.14", "B.tools.15", "B.tools.16")
@pytest.mark.anyio
@over_http
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "fields",
    [{}, {"stop": ["Paris", "city"]}, {"n": 2}, {"logprobs": True, "return_token_ids": True}],
    ids=["plain", "stop strings in arguments", "n", "logprobs"],
)
async def test_calls_are_found_in_every_format(serve: Any, special: Path, name: str, fields: dict[str, Any]) -> None:
    options: dict[str, Any] = {"folder": special, "tool_call_parser": FORMATS[name].parser}
    whole, streamed, _ = await answers(serve, written(name), AUTO | fields, **options)

    assert shown(whole) == shown(streamed)
    assert [one["index"] for one in whole] == list(range(fields.get("n", 1)))
    for choice in whole:
        assert calls_of(choice) == EXPECTED
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == (None if FORMATS[name].starts else "Look. ")


@pytest.mark.covers("B.tools.13")
@pytest.mark.anyio
@over_http
@pytest.mark.parametrize("name", FORMATS)
async def test_a_text_that_begins_as_a_marker_is_content(serve: Any, special: Path, name: str) -> None:
    text = BEGUN.get(name, "x <tool_ca")
    options: dict[str, Any] = {"folder": special, "tool_call_parser": FORMATS[name].parser}
    whole, streamed, _ = await answers(serve, text, AUTO, **options)

    assert shown(whole) == shown(streamed) == [(text, [], None, "stop")]


@pytest.mark.covers("B.tools.4")
@pytest.mark.anyio
@over_http
@pytest.mark.parametrize("name", FORMATS)
async def test_a_call_cut_by_max_tokens_has_the_arguments_so_far(serve: Any, special: Path, name: str) -> None:
    options: dict[str, Any] = {"folder": special, "tool_call_parser": FORMATS[name].parser}
    has_partial = False
    for cut in range(1, 400, 4):
        whole, streamed, _ = await answers(serve, written(name), AUTO, cut=cut, **options)

        assert shown(whole) == shown(streamed)
        assert whole[0]["finish_reason"] == "length"
        if (calls := calls_of(whole[0])) == EXPECTED:
            break
        has_partial = has_partial or bool(calls and not calls[0][1].endswith("}"))
    assert has_partial


@pytest.mark.covers("B.tools.5")
@pytest.mark.anyio
@over_http
@pytest.mark.parametrize("name", FORMATS)
async def test_a_repeated_request_has_the_same_ids(serve: Any, special: Path, name: str) -> None:
    options: dict[str, Any] = {"folder": special, "tool_call_parser": FORMATS[name].parser}
    options["headers"] = {"x-request-id": "mine"}
    whole, streamed, _ = await answers(serve, written(name), AUTO, **options)
    again, _, _ = await answers(serve, written(name), AUTO, **options)

    ids = [[call["id"] for call in choices[0]["message"]["tool_calls"]] for choices in (whole, streamed, again)]
    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids[0])) == 2
    if FORMATS[name].parser == "mistral":
        assert all(len(one) == 9 and one.isalnum() for one in ids[0])
    if name == "kimi_k2":
        assert ids[0] == ["functions.weather:0", "functions.now:1"]


@pytest.mark.anyio
@over_http
@pytest.mark.parametrize(
    ("fields", "content"), [({}, "[now(a=x) is a link] and more"), ({"stop": "and"}, "[now(a=x) is a link] ")]
)
async def test_a_link_that_looks_like_a_call_is_content(serve: Any, fields: dict[str, Any], content: str) -> None:
    text = "[now(a=x) is a link] and more"
    whole, streamed, _ = await answers(serve, text, AUTO | fields, tool_call_parser="pythonic")

    assert shown(whole) == shown(streamed) == [(content, [], None, "stop")]


CODER = ["<function=weather>", "<parameter=city>", "if a", " <"]
TWO_PIECES = [
    '<tool_call>{"name": "weather", "arguments": {"city": "Paris"',
    "}}</tool_call><tool_call>no END</tool_call> more",
]


@pytest.mark.anyio
@over_http
@pytest.mark.parametrize(
    ("name", "pieces", "fields", "arguments", "rest"),
    [
        ("qwen3_coder", CODER, {"functions": [TOOL["function"]]}, '{"city": "if a <', ("", "length")),
        ("qwen3_coder", CODER, AUTO, '{"city": "if a <', ("", "length")),
        ("hermes", TWO_PIECES, AUTO | {"stop": "END"}, '{"city": "Paris"}', ("<tool_call>no ", "tool_calls")),
    ],
)  # fmt: skip
async def test_a_token_with_much_text_loses_no_arguments(
    serve: Any, make_model: Any, name: str, pieces: list[str], fields: Any, arguments: str, rest: tuple[str, str]
) -> None:
    folder = make_model()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in pieces])
    tokenizer.save(str(folder / "tokenizer.json"))
    options: dict[str, Any] = {"folder": folder, "tool_call_parser": name, "cut": len(pieces)}
    whole, streamed, _ = await answers(serve, "".join(pieces), fields, **options)

    called = {"name": "weather", "arguments": arguments}
    legacy = "functions" in fields
    expected = (rest[0], [] if legacy else [called], called if legacy else None, rest[1])
    assert shown(whole) == shown(streamed) == [expected]


@pytest.mark.anyio
@over_http
async def test_ids_between_special_tokens_are_not_part_of_names(serve: Any, make_model: Any) -> None:
    folder = make_model()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CALL_FORMATS["mistral"].markers])
    tokenizer.add_special_tokens([AddedToken("[CALL_ID]", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}'
    whole, streamed, _ = await answers(serve, text, AUTO, folder=folder, tool_call_parser="mistral")

    assert shown(whole) == shown(streamed)
    assert calls_of(whole[0]) == EXPECTED[:1]


class Killing(TextOutput):
    """Calls `kill` soon after so many tokens."""

    after = 0
    kill: Callable[[], None]

    def emit(self, prompt_index: int, token: TokenOutput) -> bool:
        """Take a token."""
        if token.index + 1 == self.after:
            asyncio.get_running_loop().call_soon(self.kill)
        return super().emit(prompt_index, token)


async def pieces_of(tokens: Tokens, name: str, killed_after: int) -> list[TextPiece]:
    """Return the pieces of an answer with calls whose decode instance is killed after so many tokens, 0: never."""
    calls = call_options(ToolChoice(ChoiceMode.AUTO, (TOOL, NOW)), FORMATS[name].parser, "id", PROMPT)
    end = tokens.eos_token_ids[0]
    asked = request(PROMPT, max_tokens=999, stop_token_ids=(end,))
    options = TextOptions(calls=calls, silent_stop_ids=frozenset({end}))
    pieces: list[TextPiece] = []
    async with linked("PDD") as (cluster, _):

        def kill() -> None:
            decoding = [any(p.stage == "decoding" for p in one.prompts.values()) for one in cluster.instances]
            cluster.kill(decoding.index(True))

        output = Killing(asked, options, tokens, Metrics(cluster.control.view).counters)
        output.after, output.kill = killed_after, kill
        await output.run(cluster.control.dispatch.run, pieces.append)
        assert cluster.control.dispatch.ledger.retried_prompts == bool(killed_after)
    return pieces


@pytest.mark.covers("B.tools.6")
@pytest.mark.parametrize("name", FORMATS)
@virtual
async def test_a_call_goes_on_when_its_decode_is_killed(
    special: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens(read_model_files(str(special)))
    script = (*tokens._encode(written(name), add_special_tokens=False), tokens.eos_token_ids[0])
    monkeypatch.setattr(simulated_prompt, "simulated_token", lambda prompt, sequence, index, vocab: script[index])
    alone = await pieces_of(tokens, name, 0)
    for killed_after in (2, len(script) // 2, len(script) - 5):
        resumed = await pieces_of(tokens, name, killed_after)

        assert "".join(one.text for one in resumed) == "".join(one.text for one in alone)
        called = joined(delta for one in resumed for delta in one.calls)
        assert called == joined(delta for one in alone for delta in one.calls)
        assert [one.name for one in called] == ["weather", "now"]
        assert resumed[-1].finish_reason == "tool_calls"
