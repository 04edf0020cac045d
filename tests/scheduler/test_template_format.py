"""The format of calls that a chat template shows: chosen without a flag, and not where it is unclear."""

from typing import Any

import pytest

from flags.options import EngineOptions
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.serving import Cluster, open_serving
from scheduler.tools.parsers.registry import CALL_FORMATS, format_of_template
from tests.scheduler.test_tool_calls import AUTO, CALLED, PARIS, answers, shown
from tests.scheduler.test_tool_history import USER

SHOWN = {
    "hermes": 'use <tool_call>{\\"name\\": n, \\"arguments\\": a}</tool_call>',
    "qwen3_coder": "use <tool_call>\n<function=f>\n<parameter=p>v</parameter></function></tool_call>",
    "glm45": "use <tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": its arguments}.',
    "pythonic": "Respond with [func_name1(name1=value1), func_name2(name2=value2)].",
    "mistral": "{{ '[TOOL_CALLS] [' }}",
    "deepseek_v3": "<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n' + arguments + '\\n```",
    "deepseek_v31": "<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments + '<｜tool▁call▁end｜>",
    "openai": "<|start|>assistant<|channel|>final<|message|>",
    "kimi_k2": "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|>",
}


def test_each_format_has_a_template() -> None:
    assert {CALL_FORMATS[name] for name in SHOWN} == set(CALL_FORMATS.values())


@pytest.mark.parametrize("name", SHOWN)
def test_a_template_shows_its_format(name: str) -> None:
    assert format_of_template(f"before {SHOWN[name]} after") == name


@pytest.mark.parametrize(
    "template",
    [
        None, "", "{{ messages }}", "<|channel|>", "<tool_response>", "<|tool_call|>[{}]",
        "<tool_calls>[{\"name\": n, \"arguments\": a}]</tool_calls>", "<seed:tool_call><function=f><parameter=p>",
        "<tool_call>f<tool_sep><arg_key>k</arg_key><arg_value>v</arg_value>", "<longcat_tool_call>arguments",
        SHOWN["hermes"] + SHOWN["mistral"], SHOWN["llama3_json"] + SHOWN["pythonic"],
    ],
)  # fmt: skip
def test_no_format_is_chosen_where_none_or_several_are_shown(template: str | None) -> None:
    assert format_of_template(template) is None


PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.anyio
@pytest.mark.usefixtures("one_renderer")
@pytest.mark.parametrize(
    "options",
    [
        {"chat_template": PLAIN + "{# <tool_call> arguments #}"},
        {"chat_template": PLAIN + "{# [TOOL_CALLS] #}", "tool_call_parser": "hermes"},
    ],
    ids=["template", "flag"],
)
async def test_the_flag_goes_before_the_template(serve: Any, options: dict[str, Any]) -> None:
    whole, streamed, _ = await answers(serve, CALLED, AUTO, **options)

    assert shown(whole) == shown(streamed) == [("", [PARIS], None, "tool_calls")]


@pytest.mark.anyio
@pytest.mark.usefixtures("one_renderer")
async def test_auto_is_refused_where_no_format_is_chosen(serve: Any) -> None:
    async with serve(chat_template=PLAIN + "{# <tool_call> arguments [TOOL_CALLS] #}") as served:
        answer = await served.client.post("/v1/chat/completions", json={"messages": [USER]} | AUTO)

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice"), answer.text
        assert "--tool-call-parser" in answer.text


@pytest.mark.anyio
@pytest.mark.usefixtures("one_renderer")
async def test_a_template_of_its_own_for_tools_decides(serve: Any, make_model: Any) -> None:
    templates = {"default": PLAIN + "{# [TOOL_CALLS] #}", "tool_use": PLAIN + "{# <tool_call> arguments #}"}
    folder = make_model(chat_template=[{"name": name, "template": text} for name, text in templates.items()])
    whole, _, _ = await answers(serve, CALLED, AUTO, folder=folder)

    assert shown(whole) == [("", [PARIS], None, "tool_calls")]


@pytest.mark.anyio
@pytest.mark.parametrize("parser", [None, "hermes"])
async def test_a_choice_by_the_template_is_logged(
    make_model: Any, caplog: pytest.LogCaptureFixture, parser: str | None
) -> None:
    folder = make_model(chat_template=PLAIN + "{# [TOOL_CALLS] #}")
    config = SchedulerConfig(EngineOptions(model=str(folder)), SchedulerOptions(tool_call_parser=parser))
    with caplog.at_level("INFO"):
        async with open_serving(config, Cluster((), lambda address: pytest.fail("no instance")), {}):
            pass

    assert ("tool_call_parser_chosen" in caplog.text) == (parser is None)
