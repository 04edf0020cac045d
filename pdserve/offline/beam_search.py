"""Beam search: the server searches, and returns the log probabilities of each output."""

from collections.abc import Sequence
from typing import Any

from pdserve.offline.answers import output_logprobs
from pdserve.offline.bounded import bounded
from pdserve.offline.http_api import HttpApi
from pdserve.offline.lengths import token_ids
from pdserve.offline.outputs import BeamSearchOutput, BeamSearchSequence
from pdserve.offline.progress import ProgressBar
from pdserve.offline.prompts import PromptInput
from pdserve.offline.sampling_params import BeamSearchParams
from wire.errors import InvalidRequest
from wire.types import WITH_BEAMS

_GREEDY = WITH_BEAMS | {"repetition_penalty": 1}


async def beam_search(
    api: HttpApi,
    prompts: Sequence[PromptInput],
    params: Sequence[BeamSearchParams],
    limit: int,
    progress: ProgressBar,
) -> list[BeamSearchOutput]:
    """Return the hypotheses of each prompt. Raises ValueError with the number of a prompt that does not fit."""

    async def check(index: int) -> list[int]:
        ids = await token_ids(api, index, prompts[index])
        if len(ids) >= api.max_model_len:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens: the model's context of {api.max_model_len} leaves no room for "
                "an output"
            )
        return ids

    async def work(index: int) -> BeamSearchOutput:
        try:
            output = await _search_prompt(api, read[index], params[index])
        except InvalidRequest as error:
            raise ValueError(f"prompt {index}: {error}") from error
        progress.step(1)
        return output

    read = await bounded(range(len(prompts)), check, limit)
    return await bounded(range(len(prompts)), work, limit)


async def _search_prompt(api: HttpApi, prompt: list[int], params: BeamSearchParams) -> BeamSearchOutput:
    maximum = min(params.max_tokens, api.max_model_len - len(prompt))
    body = _GREEDY | {
        "prompt": prompt, "max_tokens": maximum, "ignore_eos": params.ignore_eos, "return_token_ids": True,
        "include_stop_str_in_output": params.include_stop_str_in_output, "logprobs": 0,
    }  # fmt: skip
    if params.beam_width > 1:
        body |= {"use_beam_search": True, "n": params.beam_width, "length_penalty": params.length_penalty}
    choices = (await api.post("/v1/completions", body))["choices"]
    return BeamSearchOutput([await _scored_sequence(api, prompt, choice) for choice in choices])


async def _scored_sequence(api: HttpApi, prompt: list[int], choice: Any) -> BeamSearchSequence:
    tokens, found = [*prompt, *choice["token_ids"]], output_logprobs(choice["logprobs"])
    text = (await api.post("/detokenize", {"tokens": tokens}))["prompt"]
    total = sum(one[token_id].logprob for token_id, one in zip(choice["token_ids"], found, strict=True))
    return BeamSearchSequence(tokens, found, total, text, choice["finish_reason"], choice.get("stop_reason"))
