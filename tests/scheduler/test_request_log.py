"""Log lines about requests: always with the request's id, never with its content."""

import logging
from typing import Any

import pytest

from scheduler.observability.request_done import RequestDone
from scheduler.observability.request_log import log_request, without_values
from scheduler.request import GenerationRequest
from telemetry.logs import LogEvent
from testing.scheduler.scripted_dispatcher import ScriptedDispatcher
from wire.errors import InstanceLost, InvalidGrammar, InvalidRequest, UnknownModel
from wire.types import SamplingParams

pytestmark = pytest.mark.anyio
SECRET = "xyzzy"


def _events(caplog: pytest.LogCaptureFixture) -> list[LogEvent]:
    made = [record.args[0] for record in caplog.records if isinstance(record.args, tuple) and record.args]
    return [event for event in made if isinstance(event, LogEvent)]


async def test_log_lines_have_the_request_id_and_no_content(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pdserve")
    headers = {"authorization": f"Bearer {SECRET}"}
    async with serve(f"{SECRET} again") as served:
        model = {"model": served.model}
        message = {"role": "user", "content": f"tell me {SECRET}"}
        for path, body in (
            ("/v1/completions", model | {"prompt": f"say {SECRET}"}),
            ("/v1/completions", model | {"prompt": f"say {SECRET}", "stream": True}),
            ("/v1/completions", model | {"prompt": f"say {SECRET}", "max_tokens": -1}),
            ("/v1/completions", model | {"prompt": f"{SECRET} " * 2000}),
            ("/v1/chat/completions", model | {"messages": [message]}),
        ):
            await served.client.post(path, json=body, headers=headers)
        dispatcher: ScriptedDispatcher = served.dispatcher
        dispatcher.fail_after, dispatcher.error = 1, InstanceLost("decode-0 was lost")
        await served.client.post("/v1/completions", json=model | {"prompt": f"say {SECRET}"}, headers=headers)

    events = _events(caplog)
    assert {"request_accepted", "request_done", "request_refused", "http_request"} <= {event.name for event in events}
    about_requests = [event for event in events if event.name.startswith(("request_", "http_", "client_"))]
    assert [event.name for event in about_requests if not event.fields.get("request_id")] == []
    assert [event.name for event in events if SECRET in str(event)] == []
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": {"a": SECRET}}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {SECRET: 1}}),
        ("/v1/completions", {"prompt": "a", "max_tokens": SECRET}),
        ("/v1/completions", {"prompt": "a", "stop": [f'it\'s "{SECRET}" ' * 99]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"text": SECRET}}]}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": SECRET}],
                "chat_template": "{{ raise_exception(messages[0].content) }}",
            },
        ),
    ],
)
async def test_a_refusal_is_logged_without_the_refused_value(
    serve: Any, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    caplog.set_level(logging.DEBUG, "pdserve")
    async with serve() as served:
        answer = await served.client.post(path, json={"model": served.model} | body)

    assert answer.status_code == 400
    assert "request_refused" in caplog.text
    assert SECRET not in caplog.text


def test_quoted_content_is_removed_from_logged_errors() -> None:
    message = {
        "max_tokens 'many' is no number": "max_tokens '…' is no number",
        """stop "it's" and 'a \\' b' are too long""": "stop '…' and '…' are too long",
        "the model's length is 16; it's '40": "the model's length is 16; it's '…'",
        "the prompt has 40 tokens": "the prompt has 40 tokens",
    }

    assert {text: without_values(InvalidRequest(text)) for text in message} == message
    assert SECRET not in without_values(InvalidGrammar(f"regex parse error:\n    ({SECRET}\n    ^"))
    assert without_values(UnknownModel("the model 'x' does not exist here")) == "the model 'x' does not exist here"


def test_a_failure_is_logged_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    request = GenerationRequest("r7", ((1, 2),), SamplingParams(max_tokens=4), 30.0, 10.0)

    log_request(RequestDone(request, (), "failed", 1.5, error="InstanceLost"))

    (event,) = _events(caplog)
    reported = {name: event.fields[name] for name in ("request_id", "ending", "error", "first_token_ms")}
    assert reported == {"request_id": "r7", "ending": "failed", "error": "InstanceLost", "first_token_ms": "-"}
