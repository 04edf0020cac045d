"""Serve the cases of `pdserve verify --features` on real instance processes, through the scheduler's dispatch."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.feature_cases import FeatureCase
from pdserve.feature_judges import CaseOutput, CasePrompt
from pdserve.feature_stops import StoppedText
from pdserve.verify_runs import FIRST_TOKEN_TIMEOUT_S, STALL_TIMEOUT_S, Deployment, serving
from scheduler.control import Control
from scheduler.recorded_output import RecordedOutput
from scheduler.request import GenerationRequest
from scheduler.tokens import Tokens
from wire.errors import PdserveError
from wire.types import TokenOutput

Outcome = list[CaseOutput] | str
"""The outputs of a case's prompts, or the error message."""


@dataclass(slots=True)
class FeatureOutputs:
    """The outcome of every case by name, the number of preemptions, and the KV bytes of a token."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    preemptions: int = 0
    token_bytes: int = 0


def serve_cases(
    runner: asyncio.Runner, folder: Path, deployment: Deployment, cases: Sequence[FeatureCase], tokens: Tokens,
    *, at_once: bool = False,
) -> FeatureOutputs:  # fmt: skip
    """Serve every case, one after the other or all `at_once`. Raises Unavailable when an instance dies at start.

    Cases with turns always run alone afterwards, since each turn reuses the KV cached by the one before.
    """
    return runner.run(_serve(folder, deployment, cases, tokens, at_once=at_once))


async def _serve(
    folder: Path, deployment: Deployment, cases: Sequence[FeatureCase], tokens: Tokens, *, at_once: bool
) -> FeatureOutputs:
    served = FeatureOutputs()
    async with serving(folder, deployment) as control:
        concurrent = [case for case in cases if at_once and not case.turns]
        outcomes = await asyncio.gather(*(_run_case(control, case, tokens) for case in concurrent))
        served.outcomes = {case.name: outcome for case, outcome in zip(concurrent, outcomes, strict=True)}
        for case in cases:
            if case.name not in served.outcomes:
                served.outcomes[case.name] = await _run_case(control, case, tokens)
        for instance in control.registry.living():
            served.preemptions += instance.load.preemptions
            served.token_bytes = sum(tensor.token_bytes for tensor in instance.description.kv_tensors)
    return served


async def _run_case(control: Control, case: FeatureCase, tokens: Tokens) -> Outcome:
    try:
        if case.turns:
            return [
                await _run_prompt(control, f"{case.name}, turn {turn}", prompt, tokens)
                for turn, prompt in enumerate(case.prompts)
            ]
        runs = (
            _run_prompt(control, f"{case.name} {number}", prompt, tokens) for number, prompt in enumerate(case.prompts)
        )
        return list(await asyncio.gather(*runs))
    except PdserveError as error:
        return f"{type(error).__name__}: {error}"


async def _run_prompt(control: Control, name: str, prompt: CasePrompt, tokens: Tokens) -> CaseOutput:
    request = GenerationRequest(
        request_id=f"verify {name}",
        prompts=(prompt.token_ids,),
        params=prompt.params,
        first_token_timeout_s=FIRST_TOKEN_TIMEOUT_S,
        stall_timeout_s=STALL_TIMEOUT_S,
        poolings=() if prompt.pooling is None else (prompt.pooling,),
    )
    output = _CaseSink(StoppedText(prompt, tokens) if prompt.stops else None)
    await control.dispatch.run(request, output)
    return output.answered()


class _CaseSink(RecordedOutput):
    """Keeps the output of one prompt; with `text`, up to its stop string."""

    def __init__(self, text: StoppedText | None) -> None:
        super().__init__()
        self._text = text

    def emit(self, prompt_index: int, token: TokenOutput) -> bool:
        """Keep a token; return whether the text continues."""
        super().emit(prompt_index, token)
        return self._text is None or self._text.push(token)

    def answered(self) -> CaseOutput:
        """Return the whole output."""
        done = self.done[0]
        return CaseOutput(
            token_ids={sequence: ids for (_, sequence), ids in self.tokens.items()},
            logprobs={
                sequence: [token.logprobs for token in outputs]
                for (_, sequence), outputs in self.outputs.items()
                if outputs[0].logprobs is not None
            },
            prompt_logprobs=self.scored.get(0, []),
            vector=self.vectors.get(0, ()),
            text="" if self._text is None else self._text.text,
            path=done.path,
            cached_tokens=done.times.cached_tokens,
            num_swaps=done.times.num_swaps,
            num_rebuilds=done.times.num_rebuilds,
        )
