"""The body of the request for one sequence of a prompt: ids in, ids out, or a conversation with images. Pure.

A conversation goes to /v1/chat/completions, the only route that takes images; it returns token ids too.
"""

import dataclasses
from typing import Any

import orjson

from scheduler.workers.chat_body import WorkerChatBody
from scheduler.workers.http_connection import Body
from wire.errors import InvalidRequest
from wire.types import PromptState, SamplingParams, StructuredOutput

_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
_MAX_SEED = 2**63 - 1
_MAX_BEST = 20  # --max-logprobs of a worker by default
_ONE_TOKEN = {"max_tokens": 1, "min_tokens": 1}
_ALWAYS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "stop_token_ids",
)  # fmt: skip


def check_prompt(prompt: PromptState) -> None:
    """Raise InvalidRequest, with the reason, for a request that no worker can serve."""
    params = prompt.params
    if prompt.pooling is not None:
        raise InvalidRequest("vectors and scores are not available over workers of other engines")
    if prompt.images and prompt.chat is None:
        raise InvalidRequest(
            "image_embeds, and images with a text prompt, are not available over workers of other engines: "
            "send images in chats",
            "messages",
        )
    if params.beam_search is not None:
        raise InvalidRequest("beam search is not available over workers of other engines", "use_beam_search")
    if params.prompt_logprob_token_ids:
        raise InvalidRequest(
            "prompt_logprob_token_ids is not available over workers of other engines: their completions lack it",
            "prompt_logprob_token_ids",
        )
    if params.bad_words:
        raise InvalidRequest(
            "bad_words is not available over workers of other engines: their API takes texts, which they tokenize on "
            "their own; use logit_bias with token ids",
            "bad_words",
        )


def path_of(prompt: PromptState) -> str:
    """Return the URL path of a prompt's requests."""
    return _COMPLETIONS if prompt.chat is None else _CHATS


def prefill_body(model: str, prompt: PromptState, sequence: int, kv_transfer_params: Any) -> Body:
    """Return the body that computes the prompt of a sequence, its output so far included.

    The request finishes by length: vllm-ascend holds no KV of a request that finished otherwise (mooncake_connector,
    request_finished). It has decode's parameters, so that prefill refuses what decode would: decode streams, and finds
    such an error only when the KV is there, which prefill then holds to the end of its lease.
    """
    body = _body(model, prompt, continued_ids(prompt, sequence)) | _parameters(prompt, sequence)
    body |= _ONE_TOKEN | {"stop_token_ids": [], "kv_transfer_params": kv_transfer_params}
    return _packed(prompt, body)


def score_body(model: str, prompt: PromptState) -> Body:
    """Return the body of a request for the log probabilities of the prompt.

    It is not a leg of a hand-off: if the model keeps a state (Mamba), a connector drops the prompt's last token unless
    log probabilities are requested, which vLLM 0.33 assumes of both legs (nixl.base_scheduler,
    _truncate_request_for_prefill); earlier versions always drop that token, and with it its log probability.
    """
    body = _body(model, prompt, prompt.token_ids) | _ONE_TOKEN | {"prompt_logprobs": prompt.params.prompt_logprobs}
    return _packed(prompt, body if prompt.chat is None else body | {"return_token_ids": True})


def generate_body(model: str, prompt: PromptState, sequence: int, kv_transfer_params: Any = None) -> Body:
    """Return the body that generates a sequence to its end, from the KV that `kv_transfer_params` names if given."""
    params, ids = prompt.params, continued_ids(prompt, sequence)
    done = len(ids) - len(prompt.token_ids)
    body = _body(model, prompt, ids) | _parameters(prompt, sequence) | {
        "max_tokens": params.max_tokens - done,
        "min_tokens": max(0, params.min_tokens - done),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    }  # fmt: skip
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return _packed(prompt, body)


def continued_ids(prompt: PromptState, sequence: int) -> tuple[int, ...]:
    """Return the prompt's ids, with the output so far if continuing it gives the same as one uninterrupted run.

    That is so if each token depends only on the tokens before it: greedy, without penalties, grammar, thinking budget
    or repetition detection, which count outputs and prompt differently. Otherwise, and after a conversation, which ids
    cannot follow, the sequence is generated again from its start.
    """
    output = prompt.outputs[sequence] if prompt.outputs else ()
    appends = prompt.chat is None and _appends(prompt.params)
    return (*prompt.token_ids, *output) if output and appends else prompt.token_ids


def unfinished(prompt: PromptState) -> list[int]:
    """Return the sequences that need more tokens."""
    params, outputs = prompt.params, prompt.outputs or ((),) * prompt.params.num_sequences
    return [
        sequence
        for sequence, output in enumerate(outputs)
        if len(output) < params.max_tokens
        and not (output and output[-1] in params.stop_token_ids and len(output) > params.min_tokens)
    ]


def _appends(params: SamplingParams) -> bool:
    return (
        params.temperature == 0
        and (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
        and params.structured is None
        and params.thinking is None
        and params.repetition_detection is None
    )


def _body(model: str, prompt: PromptState, ids: tuple[int, ...]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "temperature": 0.0} | ({"prompt": ids} if prompt.chat is None else {})
    return body | ({"cache_salt": prompt.cache_salt} if prompt.cache_salt else {})


def _packed(prompt: PromptState, body: dict[str, Any]) -> Body:
    packed = orjson.dumps(body)
    return packed if prompt.chat is None else WorkerChatBody(packed, prompt.chat)


def _parameters(prompt: PromptState, sequence: int) -> dict[str, Any]:
    """Return the parameters, including all that a worker would otherwise take from generation_config.json."""
    params = prompt.params
    body: dict[str, Any] = {name: getattr(params, name) for name in _ALWAYS}
    body["ignore_eos"] = True  # the ids that end a sequence are all in stop_token_ids
    body["seed"] = (params.seed + sequence) & _MAX_SEED  # each sequence of a prompt has its own seed
    if params.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    if params.allowed_token_ids:
        body["allowed_token_ids"] = params.allowed_token_ids
    if params.repetition_detection is not None:
        body["repetition_detection"] = dataclasses.asdict(params.repetition_detection)
    if params.logprobs is not None or params.logprob_token_ids:
        body |= _logprobs(params.logprobs or 0, is_chat=prompt.chat is not None)
    if params.logprob_token_ids:
        body["logprob_token_ids"] = params.logprob_token_ids
    if params.structured is not None:
        body["structured_outputs"] = _structured(params.structured)
    if params.thinking is not None:
        body["thinking_token_budget"] = _budget(params, len(continued_ids(prompt, sequence)))
    return body


def _logprobs(best: int, *, is_chat: bool) -> dict[str, Any]:
    """Return the fields for the `best` tokens; a chat counts the chosen one among them, up to vLLM's default limit."""
    if not is_chat:
        return {"logprobs": best}
    return {"logprobs": True, "top_logprobs": max(best, min(best + 1, _MAX_BEST)) if best else 0}


def _budget(params: SamplingParams, num_tokens: int) -> int:
    """Return the thinking budget; larger than any output if only a grammar needs one, to begin after the thinking.

    Without --reasoning-parser a worker refuses any budget; without a budget it would apply the grammar at once.
    """
    assert params.thinking is not None
    return num_tokens + params.max_tokens if params.thinking.budget is None else params.thinking.budget


def _structured(output: StructuredOutput) -> dict[str, Any]:
    value: Any = output.value
    if output.kind == "json_object":
        value = True
    elif output.kind in ("json", "choice"):
        value = orjson.loads(output.value)
    pattern = {} if output.whitespace_pattern is None else {"whitespace_pattern": output.whitespace_pattern}
    return {output.kind: value} | pattern
