"""From the answer of a request for text to what LLM returns. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.offline.flat_logprobs import FlatLogprobs
from pdserve.offline.outputs import CompletionOutput, Logprob, Logprobs, PromptLogprobs, RequestOutput
from wire.errors import InternalError

Told = Mapping[str, Any]


def of_completion(answer: Told, prompt: str | None, *, detokenize: bool, flat: bool) -> RequestOutput:
    """Return the outputs of a text_completion of one prompt."""
    choices = answer["choices"]
    first = choices[0]
    outputs = [_output(choice, choice["text"] if detokenize else "", flat) for choice in choices]
    prompt_logprobs = _of_prompt(first.get("prompt_logprobs"), flat)
    return _request_output(answer, prompt, first["prompt_token_ids"], prompt_logprobs, outputs)


def of_chat(answer: Told, prompt: str, *, detokenize: bool, flat: bool) -> RequestOutput:
    """Return the outputs of a chat.completion."""
    choices = answer["choices"]
    outputs = [_output(choice, choice["message"]["content"] if detokenize else "", flat) for choice in choices]
    prompt_logprobs = _of_prompt(answer.get("prompt_logprobs"), flat)
    return _request_output(answer, prompt, answer["prompt_token_ids"], prompt_logprobs, outputs)


def scored(told: Sequence[Told | None]) -> list[dict[int, Logprob] | None]:
    """Return log probabilities by position and token id; None for a position that nothing precedes."""
    return [
        None if one is None else {int(token_id): Logprob(**entry) for token_id, entry in one.items()} for one in told
    ]


def _request_output(
    answer: Told, prompt: str | None, prompt_token_ids: list[int], prompt_logprobs: PromptLogprobs | None,
    outputs: list[CompletionOutput],
) -> RequestOutput:  # fmt: skip
    details = answer["usage"].get("prompt_tokens_details") or {}
    return RequestOutput(
        answer["id"], prompt, prompt_token_ids, prompt_logprobs, outputs, num_cached_tokens=details.get("cached_tokens")
    )  # fmt: skip


def _of_prompt(told: Sequence[Told | None] | None, flat: bool) -> PromptLogprobs | None:
    if told is None:
        return None
    return FlatLogprobs(scored(told)) if flat else scored(told)


def _output(choice: Told, text: str, flat: bool) -> CompletionOutput:
    ids: list[int] = choice["token_ids"]
    found = _logprobs(choice.get("logprobs"))
    total = None if found is None else sum(one[token_id].logprob for token_id, one in zip(ids, found, strict=True))
    shown = FlatLogprobs(found) if flat and found is not None else found
    return CompletionOutput(
        choice["index"], text, ids, total, shown, choice["finish_reason"], choice.get("stop_reason")
    )  # fmt: skip


def _logprobs(told: Told | None) -> Logprobs | None:
    """Return them by token id. Raises InternalError for a server that tells them by text alone."""
    if told is None:
        return None
    if "ranked" not in told:
        raise InternalError("the server tells log probabilities by text alone: it is older than this pdserve")
    found = scored(told["ranked"])
    assert None not in found, "an output follows its prompt"
    return [one for one in found if one is not None]
