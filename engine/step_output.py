"""Turn a step's logits into what the step made: tokens, how likely they are, and candidates for beam search."""

from collections.abc import Iterable, Sequence

import torch

from engine.sampling.logits import shape
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import Chooser, Sampled, TorchChooser, failure, sample
from engine.step import Candidates, SampleRow, ScoreRow, StepBatch, StepOutput
from wire.errors import InternalError
from wire.types import TokenLogprobs

_OFF = float("-inf")


def make_output(
    logits: torch.Tensor, batch: StepBatch, scored: Iterable[torch.Tensor] = (),
    pooled: Sequence[Sequence[float]] = (), chooser: Chooser | None = None,
) -> StepOutput:  # fmt: skip
    """Return the step's output.

    `logits` [num_samples, vocab_size] are those of the sampled rows. `scored` yields those of the score rows in order,
    [any number of rows, vocab_size] at a time, so that no more of them than one slice is there at once.
    `pooled` is handed through. `chooser` chooses the tokens, with torch by default.
    """
    rows, chooser = batch.samples, chooser or TorchChooser()
    searching = [i for i, row in enumerate(rows) if row.candidates]
    candidates: Sequence[Candidates | None] = ()
    if searching:
        sampled, candidates = _search(logits, rows, searching, chooser)
    else:
        sampled = sample(logits, rows, chooser)
    logprobs = _logprobs(logits, rows, sampled.token_ids)
    try:
        scores, failure = _scores(batch.scores, scored), None
    except Exception as error:  # noqa: BLE001 - who asked for them is told; the others have their tokens
        scores, failure = [], InternalError(f"log probabilities of the prompt: {type(error).__name__}: {error}")
        failure.__cause__ = error
    return StepOutput(sampled.token_ids, logprobs, candidates, scores, sampled.failures, failure, pooled)


def _search(
    logits: torch.Tensor, rows: Sequence[SampleRow], searching: list[int], chooser: Chooser
) -> tuple[Sampled, list[Candidates | None]]:
    """Sample the rows that do not search and rank candidates of those that do: processors see log probabilities."""
    others = [i for i in range(len(rows)) if not rows[i].candidates]
    drawn = sample(logits[others], [rows[i] for i in others], chooser)
    token_ids = [0] * len(rows)
    found: list[Candidates | None] = [None] * len(rows)
    for i, token_id in zip(others, drawn.token_ids, strict=True):
        token_ids[i] = token_id
    failures = [(others[place], reason) for place, reason in drawn.failures]
    scores = shape(logits[searching].float().log_softmax(dim=-1), [rows[i] for i in searching])
    for place, i in enumerate(searching):
        found[i] = ranked = _candidates(scores[place], rows[i].candidates)
        if ranked.token_ids:
            token_ids[i] = ranked.token_ids[0]
        else:
            failures.append((i, failure(float(scores[place].max()), rows[i])))
    return Sampled(token_ids, tuple(failures)), found


def _candidates(scores: torch.Tensor, count: int) -> Candidates:
    top = scores.topk(min(count, len(scores)))
    pairs = [(t, s) for t, s in zip(top.indices.tolist(), top.values.tolist(), strict=True) if s > _OFF]
    return Candidates(tuple(token for token, _ in pairs), tuple(score for _, score in pairs))


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]
) -> Sequence[TokenLogprobs | None]:
    """Return how likely the chosen tokens are by the raw logits; empty where no row asked."""
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return ()
    picked = logits if len(asked) == len(rows) else logits[asked]
    wanted = [rows[i].params.wanted_logprobs for i in asked]
    told = dict(zip(asked, token_logprobs(picked, [token_ids[i] for i in asked], wanted), strict=True))
    return [told.get(i) for i in range(len(rows))]


def _scores(rows: Sequence[ScoreRow], scored: Iterable[torch.Tensor]) -> list[TokenLogprobs]:
    told: list[TokenLogprobs] = []
    for logits in scored:
        part = rows[len(told) : len(told) + len(logits)]
        told += token_logprobs(logits, [row.token_id for row in part], [row.top for row in part])
    return told
