"""The response before its first item: the fields of the request, with the values that apply."""

import time
from typing import Any

from scheduler.api.prepared_chat import PreparedChat
from scheduler.api.responses.response_tools import shown_tools
from scheduler.api.responses.responses_body import ResponsesBody


def response_head(
    body: ResponsesBody, model: str, chat: PreparedChat, stored_id: str | None = None
) -> dict[str, Any]:  # fmt: skip
    """Return every field that a response has; some change until it ends. `stored_id` is the id of a stored response."""
    params, text, reasoning = chat.prepared.params, body.text, body.reasoning
    shown_format = (
        {"type": "text"}
        if text is None or text.format is None
        else text.format.model_dump(by_alias=True, exclude_none=True)
    )
    return {
        "id": stored_id or f"resp_{chat.answer_id.partition('-')[2].removeprefix('resp_')}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "incomplete_details": None,
        "error": None,
        "model": model,
        "output": [],
        "usage": None,
        "previous_response_id": body.previous_response_id,
        "instructions": body.instructions,
        "tools": shown_tools(body.tools),
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "max_tool_calls": body.max_tool_calls,
        "text": {"format": shown_format, "verbosity": None if text is None else text.verbosity},
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "max_output_tokens": body.max_output_tokens,
        "truncation": body.truncation or "disabled",
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "top_logprobs": body.top_logprobs or 0,
        "store": stored_id is not None,
        "background": bool(body.background),
        "service_tier": "default",
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt": None,
    }
