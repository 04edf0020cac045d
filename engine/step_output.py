"""Turn a step's logits into its output: tokens, log probabilities, and candidates for beam search."""

from collections.abc import Iterable, Sequence

import torch

from engine.sampling.logits import change_logits
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import Chooser, Sampled, TorchChooser, failure, sample
from engine.step import Candidates, SampleRow, ScoreRow, StepBatch, StepOutput
from wire.errors import InternalError
from wire.types import TokenLogprobs

_EXCLUDED = float("-inf")


def make_output(
    logits: torch.Tensor, batch: StepBatch, scored: Iterable[torch.Tensor] = (),
    pooled: Sequence[Sequence[float]] = (), chooser: Chooser | None = None,
) -> StepOutput:  # fmt: skip
    """Return the step's output.

    `logits` [num_samples, vocab_size] are those of the sampled rows. `scored` yields those of the score rows in order,
    [any number of rows, vocab_size] at a time, so that only one slice is in memory at once.
    `pooled` is passed through. `chooser` chooses the tokens, by default with torch.
    """
    rows, chooser = batch.samples, chooser or TorchChooser()
    searching = [i for i, row in enumerate(rows) if row.candidates]
    candidates: Sequence[Candidates | None] = ()
    if searching:
        sampled, candidates = _choose_with_search(logits, rows, searching, chooser)
    else:
        sampled = sample(logits, rows, chooser)
    logprobs = _logprobs(logits, rows, sampled.token_ids)
    try:
        scores, failure = _scores(batch.scores, scored), None
    except Exception as error:  # noqa: BLE001 - fails only the prompts that requested scores
        scores, failure = [], InternalError(f"the prompt has no log probabilities: {type(error).__name__}: {error}")
        failure.__cause__ = error
    return StepOutput(sampled.token_ids, logprobs, candidates, scores, sampled.failures, failure, pooled)


def _choose_with_search(
    logits: torch.Tensor, rows: Sequence[SampleRow], searching: list[int], chooser: Chooser
) -> tuple[Sampled, list[Candidates | None]]:
    """Sample the rows without beam search; rank candidates of the others, whose processors receive logprobs."""
    others = [i for i in range(len(rows)) if not rows[i].candidates]
    drawn = sample(logits[others], [rows[i] for i in others], chooser)
    token_ids = [0] * len(rows)
    found: list[Candidates | None] = [None] * len(rows)
    for i, token_id in zip(others, drawn.token_ids, strict=True):
        token_ids[i] = token_id
    failures = [(others[place], reason) for place, reason in drawn.failures]
    scores = change_logits(logits[searching].float().log_softmax(dim=-1), [rows[i] for i in searching])
    for place, i in enumerate(searching):
        found[i] = ranked = _candidates(scores[place], logits[i], rows[i])
        if ranked.token_ids:
            token_ids[i] = ranked.token_ids[0]
        else:
            failures.append((i, failure(float(scores[place].max()), rows[i])))
    return Sampled(token_ids, tuple(failures)), found


def _candidates(scores: torch.Tensor, logits: torch.Tensor, row: SampleRow) -> Candidates:
    top = scores.topk(min(row.candidates, len(scores)))
    pairs = [(t, s) for t, s in zip(top.indices.tolist(), top.values.tolist(), strict=True) if s > _EXCLUDED]
    token_ids = tuple(token for token, _ in pairs)
    described: list[TokenLogprobs] = []
    if row.params.logprobs is not None and token_ids:
        described = token_logprobs(logits[None], token_ids, [row.params.wanted_logprobs])
    return Candidates(token_ids, tuple(score for _, score in pairs), tuple(described))


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]
) -> Sequence[TokenLogprobs | None]:
    """Return the sampled tokens' log probabilities from the raw logits; empty if no row requested them."""
    places = [i for i, row in enumerate(rows) if row.params.logprobs is not None and not row.candidates]
    if not places:
        return ()
    picked = logits if len(places) == len(rows) else logits[places]
    wanted = [rows[i].params.wanted_logprobs for i in places]
    made = dict(zip(places, token_logprobs(picked, [token_ids[i] for i in places], wanted), strict=True))
    return [made.get(i) for i in range(len(rows))]


def _scores(rows: Sequence[ScoreRow], scored: Iterable[torch.Tensor]) -> list[TokenLogprobs]:
    scores: list[TokenLogprobs] = []
    for logits in scored:
        part = rows[len(scores) : len(scores) + len(logits)]
        scores += token_logprobs(logits, [row.token_id for row in part], [row.wanted for row in part])
    return scores
