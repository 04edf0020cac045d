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
from scheduler.request import GenerationRequest, NewToken, PathEvent, PromptDone, PromptScored, Vector
from scheduler.tokens import Tokens
from wire.errors import PdserveError

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
        together = [case for case in cases if at_once and not case.turns]
        outcomes = await asyncio.gather(*(_outcome(control, case, tokens) for case in together))
        served.outcomes = {case.name: outcome for case, outcome in zip(together, outcomes, strict=True)}
        for case in cases:
            if case.name not in served.outcomes:
                served.outcomes[case.name] = await _outcome(control, case, tokens)
        for instance in control.registry.living():
            served.preemptions += instance.load.preemptions
            served.token_bytes = sum(tensor.token_bytes for tensor in instance.description.kv_tensors)
    return served


async def _outcome(control: Control, case: FeatureCase, tokens: Tokens) -> Outcome:
    try:
        if case.turns:
            return [await _ask(control, f"{case.name}, turn {turn}", ask, tokens) for turn, ask in enumerate(case.asks)]
        asked = (_ask(control, f"{case.name} {number}", ask, tokens) for number, ask in enumerate(case.asks))
        return list(await asyncio.gather(*asked))
    except PdserveError as error:
        return f"{type(error).__name__}: {error}"


async def _ask(control: Control, name: str, ask: CasePrompt, tokens: Tokens) -> CaseOutput:
    request = GenerationRequest(
        request_id=f"verify {name}",
        prompts=(ask.prompt,),
        params=ask.params,
        first_token_timeout_s=FIRST_TOKEN_TIMEOUT_S,
        stall_timeout_s=STALL_TIMEOUT_S,
        poolings=() if ask.pooling is None else (ask.pooling,),
    )
    answered, text = CaseOutput(), StoppedText(ask, tokens) if ask.stops else None
    running = control.dispatch.start(request)
    async for event in running.events():
        _take(answered, event)
        if text is not None and isinstance(event, NewToken):
            text.take(running, event)
    answered.text = "" if text is None else text.text
    return answered


def _take(answered: CaseOutput, event: PathEvent) -> None:
    match event:
        case NewToken(token_id=int(token_id)):
            answered.token_ids.setdefault(event.sequence, []).append(token_id)
            if event.logprobs is not None:
                answered.logprobs.setdefault(event.sequence, []).append(event.logprobs)
        case PromptScored():
            answered.prompt_logprobs.extend(event.tokens)
        case Vector():
            answered.vector = event.values
        case PromptDone():
            answered.path = event.path
            answered.cached_tokens = event.times.cached_tokens
            answered.num_swaps, answered.num_rebuilds = event.times.num_swaps, event.times.num_rebuilds
