"""The templates of examples/ print what the authors of each family publish as its format."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler.templates.files import given_template
from scheduler.templates.sandbox import compiler, render

ROOT = Path(__file__).parents[2]
SYSTEM, USER, ASSISTANT, LAST = "Be brief.", "Hi", "Hello.", "Why?"
TALK = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": USER},
    {"role": "assistant", "content": ASSISTANT},
    {"role": "user", "content": LAST},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# TALK in each family's format, ready for the assistant's next message.
FORMATS = {
    "alpaca": (
        "<s>Be brief.\n\n### Instruction:\nHi\n\n### Response:\nHello.</s>\n\n### Instruction:\nWhy?\n\n### Response:\n"
    ),
    "baichuan": "Be brief.<reserved_106>Hi<reserved_107>Hello.</s><reserved_106>Why?<reserved_107>",
    "chatglm2": "Be brief.\n\n[Round 1]\n\n问：Hi\n\n答：Hello.\n\n[Round 2]\n\n问：Why?\n\n答：",
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "commandr": (
        "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hello.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Why?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ),
    "deepseek": "<s>Be brief.<｜User｜>Hi<｜Assistant｜>Hello.</s><｜User｜>Why?<｜Assistant｜>",
    "deepseek_v2": "<s>Be brief.\n\nUser: Hi\n\nAssistant: Hello.</s>User: Why?\n\nAssistant:",
    "documents": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "falcon": "Be brief.\n\nUser: Hi\n\nAssistant: Hello.\n\nUser: Why?\n\nAssistant:",
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"
    ),
    "glm4": "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\nHello.<|user|>\nWhy?<|assistant|>\n",
    "granite": (
        "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Hi"
        "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Hello.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Why?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
    ),
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Why? [/INST]",
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "llava": "<s>Be brief. USER: Hi ASSISTANT: Hello.</s>USER: Why? ASSISTANT:",
    "mistral": "<s>[INST] Be brief.\n\nHi [/INST] Hello.</s>[INST] Why? [/INST]",
    "openchat": (
        "<s>Be brief.<|end_of_turn|>GPT4 Correct User: Hi<|end_of_turn|>GPT4 Correct Assistant: Hello.<|end_of_turn|>"
        "GPT4 Correct User: Why?<|end_of_turn|>GPT4 Correct Assistant:"
    ),
    "pangu": (
        "<s>[unused9]系统：Be brief.[unused10][unused9]用户：Hi[unused10][unused9]助手：Hello.[unused10]"
        "[unused9]用户：Why?[unused10][unused9]助手："
    ),
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello.<|end|>\n"
        "<|user|>\nWhy?<|end|>\n<|assistant|>\n"
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>Hello.<|im_end|><|im_start|>user<|im_sep|>Why?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>"
    ),
    "vicuna": "<s>Be brief. USER: Hi ASSISTANT: Hello.</s>USER: Why? ASSISTANT:",
    "zephyr": (
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello.</s>\n"
        "<|user|>\nWhy?</s>\n<|assistant|>\n"
    ),
}  # fmt: skip
# A conversation of one user message, where that is more than the format without the system message.
ALONE = {
    "alpaca": (
        "<s>Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nHi\n\n### Response:\n"
    ),
    "pangu": "<s>[unused9]系统：[unused10][unused9]用户：Hi[unused10][unused9]助手：",
    "vicuna": (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: Hi ASSISTANT:"
    ),
}


def source_of(family: str) -> str:
    """Return the template as `--chat-template ./examples/template_….jinja` reads it."""
    return given_template(str(ROOT / "examples" / f"template_{family}.jinja"), ROOT, {})


def rendered(family: str, messages: list[dict[str, Any]], open_last: bool = False, **context: Any) -> str:
    """Render as the sandbox does."""
    values = {"documents": None, "add_generation_prompt": not open_last} | TOKENS | context | {"messages": messages}
    return render(compiler()(source_of(family)), values, continue_final_message=open_last)


def test_each_file_has_its_format_here() -> None:
    files = {path.name for path in (ROOT / "examples").glob("*.jinja")}

    assert files == {f"template_{family}.jinja" for family in FORMATS}


@pytest.mark.parametrize("family", FORMATS)
def test_a_conversation_is_in_the_familys_format(family: str) -> None:
    assert rendered(family, TALK) == FORMATS[family]


@pytest.mark.parametrize("family", FORMATS)
def test_transformers_prints_the_same(family: str) -> None:
    expected, _ = render_jinja_template(
        conversations=[TALK], chat_template=source_of(family), add_generation_prompt=True, **TOKENS
    )

    assert rendered(family, TALK) == expected[0]


@pytest.mark.parametrize("family", FORMATS)
def test_without_a_system_message_the_rest_is_the_same(family: str) -> None:
    alone = rendered(family, TALK[1:2])

    assert alone == ALONE.get(family, alone)
    assert SYSTEM not in alone
    assert alone.count(USER) == 1
    assert FORMATS[family].endswith(alone.partition(USER)[2])


@pytest.mark.parametrize("family", FORMATS)
def test_a_closed_conversation_adds_no_generation_prompt(family: str) -> None:
    closed = rendered(family, TALK[:3], add_generation_prompt=False)

    assert FORMATS[family].startswith(closed)
    assert rendered(family, TALK[:3], open_last=True) == closed[: closed.rindex(ASSISTANT) + len(ASSISTANT)]


@pytest.mark.parametrize("family", FORMATS)
def test_a_tokenizer_without_named_tokens_is_enough(family: str) -> None:
    bare = render(compiler()(source_of(family)), {"messages": TALK, "add_generation_prompt": True})

    assert bare == re.sub("</?s>", "", FORMATS[family])


@pytest.mark.parametrize("family", ["gemma", "llama2", "mistral"])
def test_two_messages_of_one_role_are_refused_where_roles_alternate(family: str) -> None:
    with pytest.raises(Exception, match="user and assistant must take turns"):
        rendered(family, [*TALK, TALK[-1]])


@pytest.mark.parametrize(
    "family", ["alpaca", "baichuan", "chatglm2", "commandr", "deepseek", "deepseek_v2", "falcon", "llava", "pangu",
     "vicuna"],
)  # fmt: skip
def test_an_unknown_role_is_refused_where_roles_are_fixed(family: str) -> None:
    with pytest.raises(Exception, match="no role but system, user and assistant"):
        rendered(family, [*TALK, {"role": "narrator", "content": "x"}])


def test_reasoning_of_an_earlier_answer_is_left_out() -> None:
    thought = [*TALK[:2], {"role": "assistant", "content": "<think>hm</think>" + ASSISTANT}, *TALK[3:]]

    assert rendered("deepseek", thought) == FORMATS["deepseek"]


def test_documents_precede_the_conversation() -> None:
    documents = [{"title": "Rain", "text": "It rains."}, {"text": "No title."}]

    assert rendered("documents", TALK[1:2], documents=documents) == (
        "<|im_start|>system\nAnswer from these documents.\n\n[1] Rain\nIt rains.\n\n[2] \nNo title.\n<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
