"""Chats whose thinking and tool calls are parsed from the ids of vLLM workers, and whose decode worker is lost."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from scheduler.limits import ControlLimits
from scheduler.model.files import read_model_files
from scheduler.tokens import Tokens
from scheduler.tools.parsers.registry import CALL_FORMATS
from testing.vllm_worker.continuation import FakeContinuation
from testing.vllm_worker.faults import Action, Fault
from tests.conformance.joined_answers import joined_answer, whole_answer
from tests.scheduler.reasoning_chats import FORCED, TOOLS, joined, shown, write_reasoning_model
from tests.scheduler.test_chat import events
from tests.scheduler.test_tool_history import USER
from tests.scheduler.test_worker_fields import served

CHAT = "/v1/chat/completions"
NO_PROBES = ControlLimits(probe_after_s=3600.0)  # a probe would take the fault
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)


@dataclass(frozen=True)
class Chat:
    """A written answer, how it is parsed, and its thinking, content, calls and finish reason."""

    text: str
    expected: tuple[str, str, str, str]
    options: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)


CALLED = f"weather{ARGUMENTS}"
HERMES: dict[str, Any] = {"tool_call_parser": "hermes"}
THINKING: dict[str, Any] = {"reasoning_parser": "qwen3"}
CHATS = {
    "calls in text": Chat(f"Look. {CALL}", ("", "Look. ", CALLED, "tool_calls"), HERMES, TOOLS),
    "calls between special tokens": Chat(
        f"Look. [TOOL_CALLS]weather[ARGS]{ARGUMENTS}", ("", "Look. ", CALLED, "tool_calls"),
        {"tool_call_parser": "mistral"}, TOOLS,
    ),
    "calls generated again": Chat(
        f"Look. {CALL}", ("", "Look. ", CALLED, "tool_calls"), HERMES, TOOLS | {"temperature": 0.8, "seed": 3},
    ),
    "calls that must be made": Chat(
        f'[{{"name": "weather", "parameters": {ARGUMENTS}}}]', ("", "", CALLED, "tool_calls"), HERMES, FORCED,
    ),
    "thinking": Chat("<think>Hm, so.</think>Yes.", ("Hm, so.", "Yes.", "", "stop"), THINKING),
    "thinking before calls": Chat(
        f"<think>Hm, so.</think>{CALL}", ("Hm, so.", "", CALLED, "tool_calls"), HERMES | THINKING, TOOLS,
    ),
    "channels": Chat(
        HARMONY, ("Hm.", "", CALLED, "tool_calls"),
        {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}, TOOLS,
    ),
}  # fmt: skip
"""A row for each way from ids to an answer; tests/scheduler/test_auto_calls.py has the formats of calls."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has the markers of thinking and of calls."""
    made = write_reasoning_model(tmp_path_factory.mktemp("worker-chats"))
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CALL_FORMATS["mistral"].markers])
    tokenizer.save(str(made / "tokenizer.json"))
    return made


@pytest.mark.covers("B.tools.7")
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.usefixtures("one_renderer")
@pytest.mark.anyio
async def test_what_workers_generate_is_parsed_and_goes_on(
    chat: Chat, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens(read_model_files(str(folder)))
    script = (*tokens._encode(chat.text, add_special_tokens=False), tokens.eos_token_ids[0])
    body = {"messages": [USER], "temperature": 0, "max_tokens": 200, "stream_options": {"include_usage": True}}
    body |= chat.body
    headers = {"x-request-id": "mine"}
    async with served(folder, "PDD", NO_PROBES, **chat.options) as (client, cluster):
        num_prompt = (await client.post("/tokenize", json=body)).json()["count"]
        _write(script, num_prompt, monkeypatch)
        whole = await client.post(CHAT, json=body | {"stream_options": None}, headers=headers)
        assert whole.status_code == 200, whole.text
        assert shown(whole.json()) == [chat.expected]
        ids = [call["id"] for call in whole.json()["choices"][0]["message"].get("tool_calls", ())]

        cuts: list[tuple[int, Action]] = [(2, "cut"), (len(script) - 5, "cut"), (len(script) // 2, "die")]
        for after_tokens, action in cuts:
            fault = Fault(action, "during", "decode", after_tokens)
            cluster.workers[1].faults.add(fault)
            while fault.times:  # the other worker was chosen
                stream = await client.post(CHAT, json=body | {"stream": True}, headers=headers)

                chunks = events(stream.text)[:-1]
                deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
                called = [call for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
                answer = joined(chunks)
                assert shown(answer) == [chat.expected]
                assert [call["id"] for call in called] == ids
                assert answer["usage"]["completion_tokens"] == whole.json()["usage"]["completion_tokens"]
        ledger = cluster.control.dispatch.ledger
    assert (ledger.retried_prompts, ledger.differing_outputs) == (3, 0)


_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOLS = [{"name": "weather", "input_schema": _SCHEMA}]
APIS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "messages": ("/v1/messages", "/count_tokens", {"messages": [USER], "max_tokens": 200, "tools": _TOOLS}),
    "responses": ("/v1/responses", "/input_tokens", {
        "input": "hello", "max_output_tokens": 200, "store": False,
        "tools": [{"type": "function", "name": "weather", "parameters": _SCHEMA}],
    }),
}  # fmt: skip
"""Each other API: its route, the part of the path that counts the prompt's tokens, and a body with a tool."""


@pytest.mark.covers("B.tools.7")
@pytest.mark.parametrize(("path", "counts", "fields"), APIS.values(), ids=APIS)
@pytest.mark.usefixtures("one_renderer")
@pytest.mark.anyio
async def test_calls_in_other_apis_go_on_over_workers(
    path: str, counts: str, fields: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, text = Tokens(read_model_files(str(folder))), f"<think>Hm, so.</think>{CALL}"
    script = (*tokens._encode(text, add_special_tokens=False), tokens.eos_token_ids[0])
    headers, body = {"x-request-id": "mine"}, fields | {"temperature": 0}
    async with served(folder, "PDD", NO_PROBES, **HERMES, **THINKING) as (client, cluster):
        num_prompt = (await client.post(path + counts, json=body)).json()["input_tokens"]
        _write(script, num_prompt, monkeypatch)
        for _ in range(2):  # later ones find the prompt cached
            answer = await client.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
        whole = whole_answer(path, answer.json()).shown
        fault = Fault("die", "during", "decode", len(script) // 2)
        cluster.workers[1].faults.add(fault)
        while fault.times:  # the other worker was chosen
            stream = await client.post(path, json=body | {"stream": True}, headers=headers)
            assert joined_answer(path, stream.text).shown == whole
        ledger = cluster.control.dispatch.ledger

    blocks = whole.get("blocks") or whole["output"]
    (call,) = (one for one in blocks if one.get("name") == "weather")
    assert call.get("input", call.get("arguments")) in (ARGUMENTS, json.loads(ARGUMENTS))
    assert (ledger.retried_prompts, ledger.differing_outputs) == (1, 0)


def _write(script: tuple[int, ...], num_prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all workers generate the script after a prompt of this length."""
    own_tokens = FakeContinuation.next_token

    def scripted(self: FakeContinuation, params: Any, sequence: int, position: int) -> Any:
        _, logprobs = own_tokens(self, params, sequence, position)
        self.token_ids[-1] = script[len(self.token_ids) - 1 - num_prompt]
        return self.token_ids[-1], logprobs

    monkeypatch.setattr(FakeContinuation, "next_token", scripted)
