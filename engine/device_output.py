"""A step's output on a device: computed and downloaded by work launched with the step, read by the host at collect.

launch:   logits -> choice, log probabilities, candidates -> pinned host memory -> event   (nothing waits)
collect:  wait for the event -> StepOutput                                                 (nothing is launched)

So work that a later step has launched meanwhile does not delay collecting this one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from devices.interface import Device
from engine.sampling.device_choice import choose
from engine.sampling.device_logprobs import LogprobsToRead, queue_logprobs
from engine.sampling.logits import change_logits
from engine.sampling.sampler import Nucleus, failure, failures_of
from engine.step import Candidates, SampleRow, ScoreRow, StepBatch, StepOutput
from engine.transfers import Download, upload_ints
from wire.errors import InternalError, PdserveError
from wire.types import TokenLogprobs

_OFF = float("-inf")


class DeviceStep:
    """Implements PendingStep: a launched step whose results are being copied to the host."""

    def __init__(
        self, logits: torch.Tensor, batch: StepBatch, scored: Iterable[torch.Tensor], pooled: Sequence[torch.Tensor],
        device: Device, nucleus: Nucleus | None = None,
    ) -> None:  # fmt: skip
        """Launch the rest of a step whose logits are launched; arguments as for step_output.make_output and choose."""
        self._rows, self._download = batch.samples, Download(device)
        take = self._download.take
        choice = choose(logits, self._rows, nucleus)
        searching = [i for i, row in enumerate(self._rows) if row.candidates]
        self._searches = _search(logits, self._rows, searching, self._download)
        self._with_logprobs = [
            i for i, row in enumerate(self._rows) if row.params.logprobs is not None and not row.candidates
        ]
        self._logprobs = self._queue_logprobs(logits, choice.token_ids)
        self._scores, self._score_failure = self._queue_scores(batch.scores, scored)
        self._pooled = [take(values) for values in pooled]
        self._token_ids, self._best = take(choice.token_ids), take(choice.best)
        self.token_ids = choice.token_ids
        """[num_samples] int64, on the device: tokens that the next step may use as inputs."""
        self._download.end()

    def collect(self) -> StepOutput:
        """Wait for the download and return the output."""
        self._download.wait()
        token_ids: list[int] = self._token_ids.tolist()
        failures = dict(failures_of(self._best.tolist(), self._rows))
        candidates: list[Candidates | None] = [None] * len(token_ids) if self._searches else []
        for search in self._searches:
            candidates[search.row] = found = search.read()
            failures.pop(search.row, None)
            if found.token_ids:
                token_ids[search.row] = found.token_ids[0]
            else:
                failures[search.row] = failure(float(search.scores[0]), self._rows[search.row])
        logprobs = dict(zip(self._with_logprobs, _read(self._logprobs), strict=True))
        return StepOutput(
            token_ids,
            [logprobs.get(i) for i in range(len(token_ids))] if logprobs else (),
            candidates,
            [] if self._score_failure is not None else list(_read(self._scores)),
            tuple(failures.items()),
            self._score_failure,
            [values.tolist() for values in self._pooled],
        )

    def _queue_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor) -> list[LogprobsToRead]:
        """Compute the log probabilities of the sampled tokens, in the rows that requested them."""
        if not self._with_logprobs:
            return []
        places = upload_ints(self._with_logprobs, logits.device)
        wanted = [self._rows[i].params.wanted_logprobs for i in self._with_logprobs]
        chosen = token_ids.index_select(0, places)
        return queue_logprobs(logits.index_select(0, places), chosen, wanted, self._download)

    def _queue_scores(
        self, rows: Sequence[ScoreRow], scored: Iterable[torch.Tensor]
    ) -> tuple[list[LogprobsToRead], PdserveError | None]:
        """Compute the log probabilities of score rows, or return the error: it fails only the prompts of these rows."""
        queued: list[LogprobsToRead] = []
        done = 0
        try:
            for logits in scored:
                part = rows[done : done + len(logits)]
                token_ids = upload_ints([row.token_id for row in part], logits.device)
                queued += queue_logprobs(logits, token_ids, [row.wanted for row in part], self._download)
                done += len(part)
        except Exception as error:  # noqa: BLE001 - see above
            failure = InternalError(f"cannot compute the prompt's log probabilities: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return [], failure
        return queued, None


@dataclass(frozen=True, slots=True)
class _SearchToRead:
    """The best tokens of a beam search's row, on the host once the download has ended."""

    row: int
    token_ids: torch.Tensor  # [count] int64
    scores: torch.Tensor  # [count], best first: NaN first where there is one
    described: list[LogprobsToRead]

    def read(self) -> Candidates:
        """Return the candidates that may be chosen."""
        pairs = [(t, s) for t, s in zip(self.token_ids.tolist(), self.scores.tolist(), strict=True) if s > _OFF]
        token_ids = tuple(token for token, _ in pairs)
        return Candidates(token_ids, tuple(score for _, score in pairs), tuple(_read(self.described))[: len(token_ids)])


def _search(
    logits: torch.Tensor, rows: Sequence[SampleRow], searching: list[int], download: Download
) -> list[_SearchToRead]:
    """Rank the candidates of beam search rows; their logits processors receive log probabilities, not logits."""
    if not searching:
        return []
    picked = logits.index_select(0, upload_ints(searching, logits.device)).float().log_softmax(dim=-1)
    scores = change_logits(picked, [rows[i] for i in searching])
    found = []
    for place, row in enumerate(searching):
        top, params = scores[place].topk(min(rows[row].candidates, scores.shape[-1])), rows[row].params
        described: list[LogprobsToRead] = []
        if params.logprobs is not None:
            described = queue_logprobs(logits[row : row + 1], top.indices, [params.wanted_logprobs], download)
        found.append(_SearchToRead(row, download.take(top.indices), download.take(top.values), described))
    return found


def _read(parts: Sequence[LogprobsToRead]) -> Iterator[TokenLogprobs]:
    for part in parts:
        yield from part.read()
