"""Reference results for every sampling feature, from plain transformers' forward pass, processors and beam search.

It decodes one prompt at a time, with a row per sequence, token by token. Only the random numbers are the engine's own
(sampling/counter_hash.py). Presence and frequency penalties, which transformers lacks, are computed by counting.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as processors

from engine.finish import finish_of
from engine.sampling.counter_hash import uniform
from wire.types import SamplingParams, TokenLogprobs

_MAX_ROWS = 8  # limits the logits of a prompt's tokens: rows x length x vocabulary


@dataclass(frozen=True, slots=True)
class Decoded:
    """One sequence: its output ids, and for each the log probabilities of the raw logits.

    `margin` is the smallest distance of its draws, in [0, 1), from the boundary between two tokens: if it is within
    the rounding of float32 logits, either token is right.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    margin: float = math.inf

    @property
    def cumulative(self) -> float:
        """Sum of the log probabilities of the output tokens."""
        return sum(token.logprob for token in self.logprobs)


@dataclass(frozen=True, slots=True)
class _Request:
    """One sequence to decode; `number` distinguishes it from others with the same prompt and parameters."""

    prompt: tuple[int, ...]
    params: SamplingParams
    number: int


@dataclass(slots=True)
class _Row:
    """One sequence being decoded."""

    request: _Request
    outputs: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    margin: float = math.inf

    def take(self, logits: torch.Tensor) -> None:
        """Choose the next token from `logits` [vocab_size]."""
        prompt, params = self.request.prompt, self.request.params
        draw = uniform(params.seed, self.request.number, len(self.outputs))
        token, distance = _choose(logits, prompt, self.outputs, params, draw)
        self.margin = min(self.margin, distance)
        self.logprobs.append(describe_token(logits.log_softmax(-1), token, params.wanted_logprobs))
        self.outputs.append(token)


class ReferenceDecoder:
    """Decodes with a network of plain transformers (oracle.load_plain), owned by the caller. Caches its results."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._sampled: dict[_Request, Decoded] = {}
        self._beam_results: dict[tuple[tuple[int, ...], SamplingParams], list[Decoded]] = {}
        self._longest = int(network.config.get_text_config(decoder=True).max_position_embeddings)

    def decode(self, prompt: Sequence[int], params: SamplingParams) -> list[Decoded]:
        """Return the sequences for a client: `n` samples, the best of `best_of`, or the best beams."""
        if params.beam_search is not None:
            key = (tuple(prompt), params)
            if key not in self._beam_results:
                self._beam_results[key] = self._beam_search(prompt, params)
            return self._beam_results[key]
        self.prepare([(prompt, params)])
        every = [self._sampled[request] for request in _sequences_of(prompt, params)]
        if params.num_sequences == params.n:
            return every
        return sorted(every, key=lambda one: -one.cumulative)[: params.n]

    def prepare(self, requests: Iterable[tuple[Sequence[int], SamplingParams]]) -> None:
        """Decode all these except beam searches; sequences of one prompt are rows of one batch, without padding."""
        wanted: dict[tuple[int, ...], dict[_Request, None]] = {}
        for prompt, params in requests:
            if params.beam_search is None:
                new = (request for request in _sequences_of(prompt, params) if request not in self._sampled)
                wanted.setdefault(tuple(prompt), {}).update(dict.fromkeys(new))
        for every in map(list, wanted.values()):
            for first in range(0, len(every), _MAX_ROWS):
                self._decode_rows([_Row(request) for request in every[first : first + _MAX_ROWS]])

    @torch.inference_mode()
    def score_prompt(self, prompt: Sequence[int], params: SamplingParams) -> list[TokenLogprobs | None]:
        """Return the log probabilities of the prompt's tokens; None for the first."""
        logits = self._network(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0]
        scores = logits.float().log_softmax(-1)
        wanted = [params.wanted_at(at, len(prompt)) for at in range(len(prompt))]
        return [None, *(describe_token(scores[at - 1], prompt[at], wanted[at]) for at in range(1, len(prompt)))]

    @torch.inference_mode()
    def hidden_states(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return the last hidden states after the final norm, [num_tokens, hidden_size] float64."""
        states: torch.Tensor = self._network.base_model(
            input_ids=torch.tensor([list(prompt)]), use_cache=False
        ).last_hidden_state
        return states[0].double()

    @torch.inference_mode()
    def _decode_rows(self, rows: Sequence[_Row]) -> None:
        """Decode rows of one prompt. Finished rows are still computed, and ignored, until all have finished."""
        cache, new = None, [list(row.request.prompt) for row in rows]
        while any(going := [self._goes_on(row) for row in rows]):
            step = self._network(input_ids=torch.tensor(new), past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            for row, may_continue, logits in zip(rows, going, step.logits[:, -1].float(), strict=True):
                if may_continue:
                    row.take(logits)
            new = [list((row.outputs or row.request.prompt)[-1:]) for row in rows]
        for row in rows:
            self._sampled[row.request] = Decoded(tuple(row.outputs), tuple(row.logprobs), row.margin)

    def _goes_on(self, row: _Row) -> bool:
        length = len(row.request.prompt)
        return finish_of(row.outputs, row.request.params, prompt_length=length, max_model_len=self._longest) is None

    @torch.inference_mode()
    def _beam_search(self, prompt: Sequence[int], params: SamplingParams) -> list[Decoded]:
        options = params.beam_search
        assert options is not None
        config = GenerationConfig(
            num_beams=params.num_beams, num_return_sequences=params.n, do_sample=False,
            max_new_tokens=min(params.max_tokens, self._longest - len(prompt)), length_penalty=options.length_penalty,
            early_stopping=options.early_stopping, eos_token_id=list(params.stop_token_ids) or None, pad_token_id=0,
        )  # fmt: skip
        made = processors.LogitsProcessorList(_processors(params, len(prompt)))
        ids = torch.tensor([list(prompt)])
        self._network.generation_config = config
        rows = self._network.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=made
        )
        found = (_until_stop(row[len(prompt) :].tolist(), params.stop_token_ids) for row in rows)
        return [Decoded(outputs, self._describe(prompt, outputs, params)) for outputs in found]

    def _describe(
        self, prompt: Sequence[int], outputs: Sequence[int], params: SamplingParams
    ) -> tuple[TokenLogprobs, ...]:
        """Return the log probabilities of a hypothesis' tokens if they are requested."""
        if params.logprobs is None:
            return ()
        logits = self._network(input_ids=torch.tensor([[*prompt, *outputs]]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        return tuple(
            describe_token(row, token, params.wanted_logprobs) for row, token in zip(rows, outputs, strict=True)
        )


def _sequences_of(prompt: Sequence[int], params: SamplingParams) -> list[_Request]:
    """Return the sequences of one prompt, with parameters that do not affect tokens reset."""
    bare = replace(
        params, n=1, best_of=None, prompt_logprobs=None, prompt_logprob_token_ids=(), logprobs=params.logprobs or None
    )
    return [_Request(tuple(prompt), bare, number) for number in range(params.num_sequences)]


def describe_token(scores: torch.Tensor, token: int, wanted: int | tuple[int, ...]) -> TokenLogprobs:
    """Return a token's log probability in `scores` [vocab_size], and those of the `wanted` best or listed tokens."""
    ids = scores.topk(wanted).indices.tolist() if isinstance(wanted, int) else wanted
    return TokenLogprobs(
        logprob=float(scores[token]),
        rank=1 + int((scores > scores[token]).sum()),
        top_ids=tuple(ids),
        top_logprobs=tuple(float(scores[one]) for one in ids),
    )


def _choose(
    logits: torch.Tensor, prompt: Sequence[int], outputs: Sequence[int], params: SamplingParams, draw: float
) -> tuple[int, float]:
    """Return the next token and the distance of the draw from the token's boundaries.

    Transformers' processors change the logits; the token is then the best one (temperature 0), or the one that `draw`
    selects by inverse CDF.
    """
    ids = torch.tensor([[*prompt, *outputs]])
    scores = logits[None].clone()  # [1, vocab_size]
    for processor in _processors(params, len(prompt)):
        scores = processor(ids, scores)
    if params.temperature == 0:
        return int(scores[0].argmax()), math.inf
    for warper in _warpers(params):
        scores = warper(ids, scores)
    cumulative = scores[0].double().softmax(-1).cumsum(-1)
    token = int(torch.searchsorted(cumulative, draw * float(cumulative[-1]), right=True))
    below = float(cumulative[token - 1]) if token else -math.inf  # the first token has no lower boundary
    return token, min(draw - below, float(cumulative[token]) - draw)


def _processors(params: SamplingParams, prompt_length: int) -> list[Any]:
    """Return the processors that change scores and ban tokens, in transformers' order, with the counted penalties."""
    made: list[Any] = []
    if params.logit_bias:
        made.append(processors.SequenceBiasLogitsProcessor([[[token], float(b)] for token, b in params.logit_bias]))
    if params.repetition_penalty != 1.0:
        made.append(processors.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        made.append(_Counted(params.presence_penalty, params.frequency_penalty, prompt_length))
    if params.bad_words:
        words = [list(word) for word in params.bad_words]
        made.append(processors.NoBadWordsLogitsProcessor(words, eos_token_id=None))
    if params.allowed_token_ids:
        made.append(_Allow(params.allowed_token_ids))
    if params.min_tokens and params.stop_token_ids:
        stops = list(params.stop_token_ids)
        made.append(processors.MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, stops, "cpu"))
    return made


def _warpers(params: SamplingParams) -> list[Any]:
    """Return transformers' warpers in transformers' order."""
    warpers: list[Any] = [processors.TemperatureLogitsWarper(float(params.temperature))]
    if params.top_k > 0:
        warpers.append(processors.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(processors.TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(processors.MinPLogitsWarper(params.min_p))
    return warpers


@dataclass(frozen=True, slots=True)
class _Counted:
    """Presence and frequency penalties, computed by counting each row's outputs."""

    presence: float
    frequency: float
    prompt_length: int

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.prompt_length :].tolist()):
            for token, count in Counter(ids).items():
                scores[row, token] -= self.presence + self.frequency * count
        return scores


@dataclass(frozen=True, slots=True)
class _Allow:
    token_ids: Sequence[int]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(scores, float("-inf"))
        allowed[:, list(self.token_ids)] = 0
        return scores + allowed


def _until_stop(row: Sequence[int], stops: Sequence[int]) -> tuple[int, ...]:
    """Return the ids up to and including the stop token: transformers pads after it."""
    end = next((at + 1 for at, token in enumerate(row) if token in stops), len(row))
    return tuple(row[:end])
