"""Parse a worker's answers: the stream of one sequence, and the answer of a prefill. Pure."""

from typing import Any

import orjson

from wire.errors import HandoffFailed, InstanceLost, InternalError, InvalidRequest, NoCapacity, OutputDiffers
from wire.types import FinishReason, PromptLogprobs, PromptState, TokenLogprobs, TokenOutput

_DATA = b"data: "
_DONE = b"[DONE]"
_FINISHES = {
    "stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.REPETITION,
}  # fmt: skip
_GIVEN_UP = "recomputed"
"""vllm-ascend's recompute scheduler stops a sequence for this reason if others need its blocks on decode."""
_TOKEN_ID = len("token_id:")
_REFERENCE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")


class SequenceStream:
    """Turns the bytes of one sequence's event stream into tokens.

    `start` is the output position of the first token in the stream. Tokens that the client already has are compared and
    dropped: a sequence that is generated again from its start must be the same. `was_recomputed`: part of the prompt
    was neither fetched nor cached, if the worker reports that. `rendered_ids` are the prompt ids of a conversation,
    once the worker has sent them.
    """

    def __init__(self, prompt: PromptState, sequence: int, start: int) -> None:
        self.was_recomputed = False
        self.finished = False
        self.rendered_ids: tuple[int, ...] = ()
        self._prompt = prompt
        self._sequence = sequence
        self._index = start
        self._delivered = prompt.outputs[sequence] if prompt.outputs else ()
        self._rest = b""
        self._read_logprobs = _logprobs if prompt.chat is None else _chat_logprobs

    def feed(self, data: bytes) -> list[TokenOutput]:
        """Return the tokens that `data` completes. Raises what the worker reports, or OutputDiffers."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        tokens: list[TokenOutput] = []
        for line in lines:
            if line.startswith(_DATA) and not line.startswith(_DONE, len(_DATA)):
                self._take(line[len(_DATA) :], tokens)
        return tokens

    def end(self) -> None:
        """Check that the stream was complete. Raises InstanceLost."""
        if not self.finished:
            raise InstanceLost(f"its stream ended without a finish reason (output tokens: {self._index})")

    def _take(self, data: bytes, tokens: list[TokenOutput]) -> None:
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise InstanceLost(f"its stream has an event that is not JSON: {data[:80]!r}") from None
        if not isinstance(chunk, dict):
            raise InstanceLost(f"its stream has an event that is not an object: {data[:80]!r}")
        if "error" in chunk:
            raise _reported(chunk["error"])
        if usage := chunk.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self.was_recomputed = cached is not None and cached < usage["prompt_tokens"] - 1
        if self._prompt.chat is not None and chunk.get("prompt_token_ids"):
            self.rendered_ids = tuple(chunk["prompt_token_ids"])
        for choice in chunk.get("choices") or ():
            self._take_choice(choice, tokens)

    def _take_choice(self, choice: dict[str, Any], tokens: list[TokenOutput]) -> None:
        ids, reason = choice.get("token_ids") or (), choice.get("finish_reason")
        logprobs = choice.get("logprobs")
        if reason is not None and reason not in _FINISHES:
            raise InstanceLost(f"it ended the sequence with {reason!r}")
        if reason is not None and choice.get("stop_reason") == _GIVEN_UP:
            raise NoCapacity(f"it gave the sequence up (output tokens: {self._index}): others need its KV blocks")
        for at, token_id in enumerate(ids):
            index, self._index = self._index, self._index + 1
            if index < len(self._delivered):
                self._compare(index, token_id)
                continue
            token = TokenOutput(self._prompt.prompt_id, self._sequence, index, token_id)
            if logprobs:
                token.logprobs = self._read_logprobs(logprobs, at, self._prompt.params.wanted_logprobs)
            tokens.append(token)
        if reason is not None:
            self._finish(_FINISHES[reason], choice.get("stop_reason"), tokens)

    def _finish(self, reason: FinishReason, stop: object, tokens: list[TokenOutput]) -> None:
        self.finished = True
        if not tokens or tokens[-1].index != self._index - 1:
            tokens.append(TokenOutput(self._prompt.prompt_id, self._sequence, self._index, None))
        last = tokens[-1]
        last.finish = reason
        if reason is FinishReason.STOP:
            last.stop_token_id = stop if isinstance(stop, int) else last.token_id

    def _compare(self, index: int, token_id: int) -> None:
        if self._delivered[index] != token_id:
            has = self._delivered[index]
            raise OutputDiffers(f"token {index} of the regenerated output is {token_id}, but the client has {has}")


def kv_transfer_params(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the reference to the KV that a prefill holds. Raises HandoffFailed if it holds none.

    It is passed on unchanged, less `remote_prefill_cached_tokens`: vLLM's decode worker would report that number as its
    own cached tokens, which hides whether it fetched the KV (vllm.v1.engine.output_processor, from_new_request).
    """
    found = answer.get("kv_transfer_params")
    if not isinstance(found, dict) or not found.get("do_remote_prefill"):
        raise HandoffFailed(
            "it holds no KV for another worker: is its --kv-transfer-config set? MooncakeLayerwiseConnector needs "
            "--connector ascend-layerwise"
        )
    if missing := [name for name in _REFERENCE if not found.get(name)]:
        raise HandoffFailed(f"its reference has no {', '.join(missing)}, without which vLLM's decode worker crashes")
    found.pop("remote_prefill_cached_tokens", None)
    return found


def cached_tokens(answer: dict[str, Any]) -> int:
    """Return how many of the prompt's tokens a prefill found in its cache, 0 if it does not report that."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def prompt_logprobs(answer: dict[str, Any], prompt: PromptState) -> PromptLogprobs:
    """Return the log probabilities of the prompt's tokens from an answer that has them. Raises InternalError."""
    holder, ids = answer["choices"][0], prompt.token_ids
    if prompt.chat is not None:
        holder, ids = answer, answer.get("prompt_token_ids") or ()
    found, wanted = holder.get("prompt_logprobs") or (), prompt.params.prompt_logprobs or 0
    if len(found) != len(ids):
        raise InternalError(f"the prompt has {len(ids)} tokens, but its answer has log probabilities of {len(found)}")
    tokens = [_scored(one, token_id, wanted) for one, token_id in zip(found, ids, strict=True)]
    return PromptLogprobs(prompt.prompt_id, 0, tuple(tokens))


def _scored(found: dict[str, Any] | None, token_id: int, wanted: int) -> TokenLogprobs | None:
    if found is None:
        return None
    actual = found[str(token_id)]
    best = sorted(found.items(), key=lambda item: int(item[1]["rank"]))[:wanted]
    ids = tuple(int(one) for one, _ in best)
    return TokenLogprobs(actual["logprob"], actual["rank"], ids, tuple(value["logprob"] for _, value in best))


def _logprobs(found: dict[str, Any], at: int, wanted: int | tuple[int, ...]) -> TokenLogprobs:
    """Return the log probabilities of the token at index `at` of a completion's chunk."""
    top = {int(one[_TOKEN_ID:]): logprob for one, logprob in (found["top_logprobs"][at] or {}).items()}
    return _ranked(int(found["tokens"][at][_TOKEN_ID:]), found["token_logprobs"][at], top, wanted)


def _chat_logprobs(found: dict[str, Any], at: int, wanted: int | tuple[int, ...]) -> TokenLogprobs:
    """Return the same for a chat's chunk."""
    entry = found["content"][at]
    top = {int(one["token"][_TOKEN_ID:]): one["logprob"] for one in entry["top_logprobs"]}
    return _ranked(int(entry["token"][_TOKEN_ID:]), entry["logprob"], top, wanted)


def _ranked(token_id: int, value: float, top: dict[int, float], wanted: int | tuple[int, ...]) -> TokenLogprobs:
    """Return the log probabilities of a token; one that is not among the best gets the rank after them."""
    best = sorted(top.items(), key=lambda item: -item[1])
    rank = next((number for number, (one, _) in enumerate(best, 1) if one == token_id), len(best) + 1)
    best = [(one, top[one]) for one in wanted if one in top] if isinstance(wanted, tuple) else best[:wanted]
    return TokenLogprobs(value, rank, tuple(one for one, _ in best), tuple(logprob for _, logprob in best))


def _reported(error: Any) -> InvalidRequest | InternalError:
    """Return the error that a worker reports in its stream."""
    found = error if isinstance(error, dict) else {}
    message = str(found.get("message", error))[:1000]
    return InvalidRequest(message) if found.get("code") in (400, 422) else InternalError(message)
