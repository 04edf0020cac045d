"""`pdserve verify --base-url URL --reference URL`: two OpenAI endpoints, token by token and by log probability."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tqdm import tqdm

from pdserve.client import Client
from pdserve.verify_prompts import texts
from scheduler.workers.proof import MAX_GAP, Position, largest_gap
from wire.errors import ConfigError, Unavailable

_TOP = 5
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class EndpointComparison:
    """How two answers compare. `largest_gap` is over the positions before and at the first divergence.

    `divergence` describes that divergence; None if all tokens are equal.
    """

    largest_gap: float
    divergence: str | None = None

    @property
    def is_close(self) -> bool:
        """Whether rounding explains all differences."""
        return self.largest_gap <= MAX_GAP


def verify_endpoints(base_url: str, reference_url: str, count: int, max_tokens: int) -> int:
    """Send the same texts to both and print how the answers compare; return the exit status.

    Raises ConfigError for an endpoint that answers without log probabilities, Unavailable for one that does not answer.
    """
    found, reference = (_Endpoint(url) for url in (base_url, reference_url))
    prompts = f"{count} prompt{'' if count == 1 else 's'}"
    print(f"{found} against {reference}: {prompts}, {max_tokens} tokens each, greedy", flush=True)
    by_id = found.names_tokens_by_id() and reference.names_tokens_by_id()
    compared = []
    for prompt in tqdm(texts(count), unit="prompt", leave=False):
        answers = [one.answer(prompt, max_tokens, by_id=by_id) for one in (reference, found)]
        compared.append(compare(*answers))
    for number, one in enumerate(compared):
        if one.divergence is not None:
            print(f"{'close' if one.is_close else 'DIFFERENT'}: prompt {number}, {one.divergence}")
    equal = sum(one.divergence is None for one in compared)
    gap = max(one.largest_gap for one in compared)
    print(f"{equal} of {count} prompts equal; log probabilities at most {gap:.4g} apart (limit {MAX_GAP:g})")
    return 0 if all(one.is_close for one in compared) else 1


def compare(reference: Sequence[Position], found: Sequence[Position]) -> EndpointComparison:
    """Compare two answers up to their first different token. Pure."""
    gap = 0.0
    for at, (one, other) in enumerate(zip_longest(reference, found)):
        if one is None or other is None:
            return EndpointComparison(float("inf"), f"token {at}: {_shown(other)} instead of {_shown(one)}")
        gap = max(gap, largest_gap(one, other))
        if one.token != other.token:
            return EndpointComparison(gap, f"token {at}: {_shown(other)} instead of {_shown(one)}")
    return EndpointComparison(gap)


def positions(logprobs: dict[str, Any]) -> list[Position]:
    """Return the positions of a completion's `logprobs`. Pure."""
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [
        Position(_token(name), logprob, {_token(likely): value for likely, value in (top or {}).items()})
        for name, logprob, top in rows
    ]


class _Endpoint:
    """One endpoint and the first model that it lists."""

    def __init__(self, url: str) -> None:
        self._client = Client(url, timeout_s=_TIMEOUT_S)
        listed = self._client.get("/v1/models").json()
        cards = listed.get("data") if isinstance(listed, dict) else None
        if not cards:
            raise ConfigError(f"{url}/v1/models names no model: is it an OpenAI server?")
        self._model = cards[0]["id"]

    def __str__(self) -> str:
        return f"{self._client.base_url} ({self._model})"

    def names_tokens_by_id(self) -> bool:
        """Return whether it can name tokens by id in log probabilities, as vLLM and pdserve do."""
        try:
            return isinstance(self.answer("a", 1, by_id=True)[0].token, int)
        except Unavailable:  # it refuses the field
            return False

    def answer(self, prompt: str, max_tokens: int, *, by_id: bool) -> list[Position]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": _TOP}
        reply = self._client.post("/v1/completions", body | ({"return_tokens_as_token_ids": True} if by_id else {}))
        answer = reply.json()
        if reply.status != 200 or not isinstance(answer, dict):
            raise Unavailable(f"{self} returned HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}")
        logprobs = answer["choices"][0].get("logprobs")
        if not logprobs:
            raise ConfigError(f"{self} answers without log probabilities, which the comparison needs")
        return positions(logprobs)


def _token(name: str) -> int | str:
    """Return the id in `token_id:N`, else the text."""
    prefix, _, number = name.rpartition(":")
    return int(number) if prefix == "token_id" and number.isdecimal() else name


def _shown(position: Position | None) -> str:
    return "nothing" if position is None else f"{position.token!r} ({position.logprob:.4g})"
