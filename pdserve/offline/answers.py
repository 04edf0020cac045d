"""Convert the response to a text request into LLM's output classes. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.offline.flat_logprobs import FlatLogprobs
from pdserve.offline.outputs import CompletionOutput, Logprob, PromptLogprobs, RequestOutput
from wire.errors import InternalError

JsonObject = Mapping[str, Any]


def of_completion(answer: JsonObject, prompt: str | None, *, detokenize: bool, flat: bool) -> RequestOutput:
    """Return the outputs of a text_completion of one prompt."""
    choices = answer["choices"]
    first = choices[0]
    outputs = [_completion_output(choice, choice["text"] if detokenize else "", flat) for choice in choices]
    prompt_logprobs = _of_prompt(first.get("prompt_logprobs"), flat)
    return _request_output(answer, prompt, first["prompt_token_ids"], prompt_logprobs, outputs)


def of_chat(answer: JsonObject, prompt: str, *, detokenize: bool, flat: bool) -> RequestOutput:
    """Return the outputs of a chat.completion."""
    choices = answer["choices"]
    outputs = [
        _completion_output(choice, choice["message"]["content"] if detokenize else "", flat) for choice in choices
    ]
    prompt_logprobs = _of_prompt(answer.get("prompt_logprobs"), flat)
    return _request_output(answer, prompt, answer["prompt_token_ids"], prompt_logprobs, outputs)


def output_logprobs(fields: JsonObject) -> list[dict[int, Logprob]]:
    """Return log probabilities by token id. Raises InternalError for a server that returns them by text only."""
    if "ranked" not in fields:
        raise InternalError("the server returns log probabilities by text only: it is older than this pdserve")
    found = _scored(fields["ranked"])
    assert None not in found, "an output follows its prompt"
    return [one for one in found if one is not None]


def _scored(fields: Sequence[JsonObject | None]) -> list[dict[int, Logprob] | None]:
    """Return log probabilities by position and token id; None for the first position."""
    return [
        None if one is None else {int(token_id): Logprob(**entry) for token_id, entry in one.items()} for one in fields
    ]


def _request_output(
    answer: JsonObject, prompt: str | None, prompt_token_ids: list[int], prompt_logprobs: PromptLogprobs | None,
    outputs: list[CompletionOutput],
) -> RequestOutput:  # fmt: skip
    details = answer["usage"].get("prompt_tokens_details") or {}
    return RequestOutput(
        answer["id"], prompt, prompt_token_ids, prompt_logprobs, outputs, num_cached_tokens=details.get("cached_tokens")
    )  # fmt: skip


def _of_prompt(fields: Sequence[JsonObject | None] | None, flat: bool) -> PromptLogprobs | None:
    if fields is None:
        return None
    return FlatLogprobs(_scored(fields)) if flat else _scored(fields)


def _completion_output(choice: JsonObject, text: str, flat: bool) -> CompletionOutput:
    ids: list[int] = choice["token_ids"]
    fields = choice.get("logprobs")
    found = None if fields is None else output_logprobs(fields)
    total = None if found is None else sum(one[token_id].logprob for token_id, one in zip(ids, found, strict=True))
    shown = FlatLogprobs(found) if flat and found is not None else found
    return CompletionOutput(
        choice["index"], text, ids, total, shown, choice["finish_reason"], choice.get("stop_reason")
    )  # fmt: skip
