"""Check the answers of `pdserve verify --features` against their reference.

A judge returns None for correct answers, else an error message. The reference is plain transformers
(engine/reference_decoding.py); structured output is checked by a parser, vectors against hidden states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler.vectors import cosine
from wire.types import Pooling, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.reference_decoding import ReferenceDecoder

LOGPROB_TOLERANCE = 1e-4
VECTOR_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class CasePrompt:
    """One prompt with its parameters. `stops` are its stop strings."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    pooling: Pooling | None = None
    stops: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether the prompt generates tokens, rather than a vector."""
        return self.pooling is None


@dataclass(slots=True)
class CaseOutput:
    """One prompt's output: token ids and log probabilities by sequence; the prompt's log probabilities; the vector; the
    text, if it has stop strings.

    The prompt was preempted between two tokens `num_swaps` times with a copy of its KV, `num_rebuilds` times without.
    """

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    vector: tuple[float, ...] = ()
    text: str = ""
    cached_tokens: int = 0
    num_swaps: int = 0
    num_rebuilds: int = 0
    path: str = ""

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """The token ids of each sequence, by sequence number."""
        return [tuple(self.token_ids[number]) for number in sorted(self.token_ids)]


Answers = Sequence[CaseOutput]
Judge = Callable[["ReferenceDecoder", Sequence[CasePrompt], Answers], str | None]


def equal_tokens(decoder: "ReferenceDecoder", prompts: Sequence[CasePrompt], answers: Answers) -> str | None:
    """Check all tokens of every sequence against the reference."""
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        wanted = [one.token_ids for one in decoder.decode(prompt.token_ids, prompt.params)]
        if answer.sequences != wanted:
            return f"prompt {number}: {_first_difference(wanted, answer.sequences)}"
    return None


def equal_logprobs(decoder: "ReferenceDecoder", prompts: Sequence[CasePrompt], answers: Answers) -> str | None:
    """Check the tokens and their log probabilities."""
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        for sequence, wanted in enumerate(decoder.decode(prompt.token_ids, prompt.params)):
            if tuple(answer.token_ids.get(sequence, ())) != wanted.token_ids:
                return f"prompt {number}: {_first_difference([wanted.token_ids], answer.sequences)}"
            wrong = _find_difference(wanted.logprobs, answer.logprobs.get(sequence, []))
            if wrong is not None:
                return f"prompt {number}, sequence {sequence}, output {wrong}"
    return None


def equal_prompt_logprobs(decoder: "ReferenceDecoder", prompts: Sequence[CasePrompt], answers: Answers) -> str | None:
    """Check the tokens and the prompt's log probabilities."""
    different = equal_tokens(decoder, prompts, answers)
    if different is not None:
        return different
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        wrong = _find_difference(decoder.score_prompt(prompt.token_ids, prompt.params), answer.prompt_logprobs)
        if wrong is not None:
            return f"prompt {number}, token {wrong}"
    return None


def equal_vectors(decoder: "ReferenceDecoder", prompts: Sequence[CasePrompt], answers: Answers) -> str | None:
    """Check pooled vectors against the hidden states of transformers."""
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert prompt.pooling is not None
        hidden = decoder.hidden_states(prompt.token_ids)
        pooled = hidden.mean(0) if prompt.pooling.how == "mean" else hidden[-1]
        wanted = pooled[: prompt.pooling.dimensions]
        if prompt.pooling.normalize is not False:
            wanted = wanted / wanted.norm()
        if len(answer.vector) != len(wanted):
            return f"prompt {number}: the vector has {len(answer.vector)} values in place of {len(wanted)}"
        worst = max(abs(a - b) for a, b in zip(answer.vector, wanted.tolist(), strict=True))
        if worst > VECTOR_TOLERANCE * max(1.0, float(wanted.abs().max())):
            return f"prompt {number}: a value is {worst:.2g} off"
    return None


def equal_cosine(decoder: "ReferenceDecoder", prompts: Sequence[CasePrompt], answers: Answers) -> str | None:
    """Check the score of a pair of texts: the cosine of their vectors."""
    wrong = equal_vectors(decoder, prompts, answers)
    if wrong is not None:
        return wrong
    first, second = (decoder.hidden_states(prompt.token_ids)[-1] for prompt in prompts[:2])
    wanted = float(first @ second / (first.norm() * second.norm()))
    gap = abs(cosine(answers[0].vector, answers[1].vector) - wanted)
    return f"the score is {gap:.2g} off" if gap > VECTOR_TOLERANCE else None


def best_of_all(decoder: "ReferenceDecoder", prompts: Sequence[CasePrompt], answers: Answers) -> str | None:
    """Check all generated sequences, and that the best by their log probabilities are returned."""
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        wanted = decoder.decode(prompt.token_ids, prompt.params)
        sums = {i: sum(token.logprob for token in logprobs if token) for i, logprobs in answer.logprobs.items()}
        best = sorted(sums, key=lambda i: -sums[i])[: prompt.params.n]
        found = [tuple(answer.token_ids[i]) for i in best]
        if found != [one.token_ids for one in wanted]:
            return f"prompt {number}: {_first_difference([one.token_ids for one in wanted], found)}"
    return None


def reads_as(decode: Callable[[Sequence[int]], str], good: Callable[[str], bool]) -> Judge:
    """Return a judge that checks the text alone: the grammar defines the allowed tokens, so there is no reference."""

    def judge(decoder: "ReferenceDecoder", prompts: Sequence[CasePrompt], answers: Answers) -> str | None:
        for number, answer in enumerate(answers):
            for ids in answer.sequences:
                text = decode([token for token in ids if token not in prompts[number].params.stop_token_ids])
                if not good(text):
                    return f"prompt {number}: the text {text[:60]!r} does not have the requested form"
        return None if all(answer.sequences for answer in answers) else "a prompt has no sequence"

    return judge


def _find_difference(wanted: Sequence[TokenLogprobs | None], found: Sequence[TokenLogprobs | None]) -> str | None:
    """Return where two lists of log probabilities differ; ties among the best may be in any order."""
    if len(wanted) != len(found):
        return f"{min(len(wanted), len(found))}: the number of log probabilities is {len(found)}, not {len(wanted)}"
    for at, (ours, theirs) in enumerate(zip(wanted, found, strict=True)):
        if (ours is None) != (theirs is None):
            return f"{at}: {theirs} in place of {ours}"
        if ours is None or theirs is None:
            continue
        pairs = zip((ours.logprob, *ours.top_logprobs), (theirs.logprob, *theirs.top_logprobs), strict=False)
        gap = max(abs(a - b) for a, b in pairs)
        if len(ours.top_ids) != len(theirs.top_ids):
            return f"{at}: the number of top log probabilities is {len(theirs.top_ids)}, not {len(ours.top_ids)}"
        if gap > LOGPROB_TOLERANCE:
            return f"{at}: a log probability is {gap:.2g} off"
    return None


def _first_difference(wanted: Sequence[tuple[int, ...]], found: Sequence[tuple[int, ...]]) -> str:
    if len(wanted) != len(found):
        return f"the number of sequences is {len(found)}, not {len(wanted)}"
    for number, (ours, theirs) in enumerate(zip(wanted, found, strict=True)):
        for at in range(max(len(ours), len(theirs))):
            pair = (ours[at : at + 1], theirs[at : at + 1])
            if pair[0] != pair[1]:
                return f"sequence {number}, token {at}: {pair[1] or 'nothing'} in place of {pair[0] or 'nothing'}"
    return "equal"
