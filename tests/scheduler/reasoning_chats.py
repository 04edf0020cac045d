"""Chats of reasoning models over a scripted dispatcher, whole and streamed, and their answers."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from scheduler.request import GenerationRequest
from testing.scheduler.scripted_dispatcher import Line, Script
from tests.scheduler.conftest import CHATML, write_model
from tests.scheduler.test_chat import events
from tests.scheduler.test_tool_history import TOOL, USER

PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
SPECIAL = ("[THINK]", "[/THINK]", "<x>", *HARMONY)
NAMES = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
ASKS = NAMES + "{% if add_generation_prompt %}assistant:{% endif %}"
"""Templates without special tokens, in which a turn begins with its role's name."""
OPEN, CLOSED = CHATML + "{{ '<think>\n' }}", CHATML + "{{ '<think>\n\n</think>\n\n' }}"
TOOLS = {"tools": [TOOL]}
FORCED = TOOLS | {"tool_choice": "required"}
FORM = {"response_format": {"type": "json_object"}}


def write_reasoning_model(folder: Path) -> Path:
    """Write a model whose tokenizer has the markers of thinking, those of Mistral as special tokens."""
    made = write_model(folder)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False) for text in PLAIN])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def script_of(text: str, served: list[Any], cut: int = 0) -> Script:
    """Return a script of `text` and the end token, or of its first `cut` tokens; `served` gets the server."""

    def script(request: GenerationRequest, prompt: int, sequence: int) -> Line:
        end = served[0].context.tokens.eos_token_ids[0]
        ids = served[0].ids(text)
        return Line(ids[:cut]) if cut else Line((*ids, end), stop_token_id=end)

    return script


async def ask(
    serve: Any, folder: Path, text: str, fields: dict[str, Any], *, parser: str | None = "qwen3", cut: int = 0,
    **options: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return the whole answer, the choices that a stream joins to with its last usage, and the dispatcher."""
    got: list[Any] = []
    async with serve(script_of(text, got, cut), folder=folder, reasoning_parser=parser, **options) as served:
        got.append(served)
        body = {"messages": [USER], "temperature": 1} | fields
        whole = await served.client.post("/v1/chat/completions", json=body)
        assert whole.status_code == 200, whole.text
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        stream = await served.client.post("/v1/chat/completions", json=asked)
        return whole.json(), joined(events(stream.text)[:-1]), served.dispatcher


def joined(chunks: list[Any]) -> dict[str, Any]:
    """Return what a stream's chunks join to, in the form of a whole answer."""
    choices: dict[int, Any] = {}
    usage = chunks.pop()["usage"]
    for chunk in chunks:
        (part,) = chunk["choices"]
        message = {"content": "", "reasoning": "", "reasoning_content": "", "calls": ""}
        choice = choices.setdefault(part["index"], {"message": message, "tokens": []})
        delta, message = part["delta"], choice["message"]
        if delta.get("reasoning"):
            assert message["content"] in ("", USER["content"]), "the thinking comes first"
        for name in ("reasoning", "reasoning_content", "content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            message["calls"] += call["function"].get("name", "") + call["function"]["arguments"]
        choice["tokens"] += [one["token"] for one in (part["logprobs"] or {}).get("content", ())]
        choice["finish_reason"] = part["finish_reason"]
    return {"choices": [choices[at] for at in sorted(choices)], "usage": usage}


def shown(answer: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return thinking, content, calls and finish reason of each choice."""
    found = []
    for choice in answer["choices"]:
        message = choice["message"]
        assert (message["reasoning"] or "") == (message.get("reasoning_content") or "")
        calls = [one["function"] for one in message.get("tool_calls", ())]
        called = message.get("calls") or "".join(one["name"] + one["arguments"] for one in calls)
        found.append((message["reasoning"] or "", message["content"] or "", called, choice["finish_reason"]))
    return found


def said(text: str) -> dict[str, Any]:
    """Return the fields of a chat in which the user says `text`."""
    return {"messages": [{"role": "user", "content": text}]}


def prefilled(text: str) -> dict[str, Any]:
    """Return the fields of a chat whose answer begins with `text`."""
    messages = [{"role": "user", "content": "[THINK]?"}, {"role": "assistant", "content": text}]
    return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
