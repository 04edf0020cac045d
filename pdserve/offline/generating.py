"""Generate texts and chats: first check every prompt, then send all, a bounded number at once."""

import functools
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from pdserve.offline.answers import of_chat, of_completion
from pdserve.offline.bodies import chat_logprobs, completion_logprobs, sampling_body
from pdserve.offline.bounded import bounded
from pdserve.offline.http_api import HttpApi
from pdserve.offline.lengths import room_after_chat, room_for
from pdserve.offline.outputs import RequestOutput
from pdserve.offline.progress import ProgressBar
from pdserve.offline.prompts import PromptInput
from pdserve.offline.request_stats import request_stats
from pdserve.offline.sampling_params import SamplingParams
from wire.errors import InvalidRequest

Chat = Mapping[str, Any]
"""The fields of a conversation, including `messages`."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt or chat; `seed` None is a random one, `cache_salt` is common to all prompts of an LLM."""

    index: int
    prompt: PromptInput | Chat
    params: SamplingParams
    priority: int = 0
    seed: int | None = None
    cache_salt: str | None = None


async def generate(api: HttpApi, jobs: Sequence[Job], limit: int, progress: ProgressBar) -> list[RequestOutput]:
    """Return the outputs in the order of the jobs.

    Raises ValueError with a prompt's number, if possible before any prompt is computed; raises the server's errors.
    """
    rooms = await bounded(jobs, lambda job: _free_tokens(api, job), limit)

    async def work(job: Job) -> RequestOutput:
        try:
            output = await _run_job(api, job, rooms[job.index])
        except InvalidRequest as error:
            raise ValueError(f"prompt {job.index}: {error}") from error
        progress.done(output)
        return output

    return await bounded(jobs, work, limit)


def seed_of(params: SamplingParams, own: int | None, number: int) -> int | None:
    """Return the seed of a prompt; `own` is LLM's seed, `number` counts prompts since LLM was created."""
    if params.seed is not None or own is None:
        return params.seed
    return int.from_bytes(hashlib.sha256(f"{own}:{number}".encode()).digest()[:8], "big") >> 1


def _free_tokens(api: HttpApi, job: Job) -> Awaitable[int | None]:
    if isinstance(job.prompt, PromptInput):
        return room_for(api, job.index, job.prompt, job.params)
    return room_after_chat(api, job.index, job.prompt, job.params)


async def _run_job(api: HttpApi, job: Job, max_tokens: int | None) -> RequestOutput:
    body = sampling_body(job.params, max_tokens=max_tokens, seed=job.seed)
    if job.priority:
        body["priority"] = job.priority
    own = job.prompt.cache_salt if isinstance(job.prompt, PromptInput) else None
    if salts := [salt for salt in (job.cache_salt, own) if salt is not None]:
        body["cache_salt"] = "-".join(salts)
    make: Callable[..., Awaitable[RequestOutput]] = _complete if isinstance(job.prompt, PromptInput) else _chat
    return await make(api, job, body)


async def _complete(api: HttpApi, job: Job, body: dict[str, Any]) -> RequestOutput:
    prompt = job.prompt
    assert isinstance(prompt, PromptInput)
    body |= completion_logprobs(job.params)
    body["prompt"] = prompt.text if prompt.token_ids is None else list(prompt.token_ids)
    if prompt.images:
        body["multi_modal_data"] = {"image": prompt.images}
    make = functools.partial(of_completion, prompt=prompt.text)
    return await _run_timed(api, "/v1/completions", body, job.params, make)


async def _chat(api: HttpApi, job: Job, body: dict[str, Any]) -> RequestOutput:
    assert isinstance(job.prompt, Mapping)
    body |= {**job.prompt, **chat_logprobs(job.params), "separate_reasoning": False}
    output = await _run_timed(api, "/v1/chat/completions", body, job.params, functools.partial(of_chat, prompt=""))
    output.prompt = (await api.post("/detokenize", {"tokens": output.prompt_token_ids}))["prompt"]
    return output


async def _run_timed(
    api: HttpApi, path: str, body: Mapping[str, Any], params: SamplingParams, make: Callable[..., RequestOutput]
) -> RequestOutput:
    arrived, queued = time.time(), time.monotonic()
    answer = await api.post_whole(path, body)
    last = time.monotonic()
    output = make(orjson.loads(answer.body), detokenize=params.detokenize, flat=params.flat_logprobs)
    output.metrics = request_stats(
        answer.headers.get("server-timing", ""), arrival_time=arrived, queued_ts=queued, last_token_ts=last,
        num_tokens=sum(len(one.token_ids) for one in output.outputs),
    )  # fmt: skip
    return output
