"""Estimate what a step of any OpenAI server costs (wire/step_cost.py), from the answers to a few requests.

time to first token   = constant + prompt tokens x cost of a prompt token
time per output token = base + concurrent streams x cost of a sequence
"""

import asyncio
import random
import statistics
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.timeline import Timeline
from wire.errors import ConfigError, Unavailable
from wire.step_cost import StepCost

Send = Callable[[LoadRequest], Coroutine[Any, Any, Timeline]]

_LONGEST_S = 600.0
_REPEATS = 3
_STREAMS = (1, 2, 4, 8)
_OUTPUT_TOKENS = 48
_LEAST_SPREAD = 2.0
"""The longest prompts' TTFT must exceed the shortest ones' by this many times the spread among the shortest."""


async def calibrate(send: Send, num_words: int, show: Callable[[str], None]) -> StepCost:
    """Send about thirty requests, with prompts of up to `num_words` random words; `show` prints lines of progress.

    Raises Unavailable if a request fails, ConfigError if the times do not show what a prompt token costs, or if all
    requests together take more than 10 minutes.
    """
    try:
        async with asyncio.timeout(_LONGEST_S):
            prompts, streams = await _measure(send, num_words, show)
    except TimeoutError:
        raise ConfigError(f"the requests take longer than {_LONGEST_S:g} s: set a shorter --longest-prompt") from None
    return cost_of(prompts, streams)


async def _measure(
    send: Send, num_words: int, show: Callable[[str], None]
) -> tuple[list[Sequence[Timeline]], list[Sequence[Timeline]]]:
    """Return the requests of each length, and those of each number of concurrent streams."""
    words = random.Random()  # noqa: S311 - no secrets; new words each run, as the server has cached earlier ones
    prompts, streams = list[Sequence[Timeline]](), list[Sequence[Timeline]]()
    await _send(send, [LoadRequest(_text(words, 8), 8)])
    for length in (num_words // 16, num_words // 4, num_words // 2, num_words):
        show(f"measuring the time to first token of prompts of {length} words")
        requests = [LoadRequest(_text(words, length), 1) for _ in range(_REPEATS)]
        prompts.append([line for request in requests for line in await _send(send, [request])])
    for count in _STREAMS:
        show(f"measuring the time per output token of {count} concurrent stream{'' if count == 1 else 's'}")
        requests = [LoadRequest(_text(words, 8), _OUTPUT_TOKENS) for _ in range(count)]
        streams.append(await _send(send, requests))
    return prompts, streams


def cost_of(prompts: Sequence[Sequence[Timeline]], streams: Sequence[Sequence[Timeline]]) -> StepCost:
    """Return the cost that fits the shortest TTFT of each prompt length, and the median TPOT of each number of streams.

    `prompts` has the repeated requests of each prompt length, the shortest first; `streams` has, for each number of
    streams, that many concurrent requests. Raises ConfigError if the lengths or times differ too little.
    """
    best = [min(lines, key=lambda line: line.ttft_s) for lines in prompts]
    longer_s, noise_s = best[-1].ttft_s - best[0].ttft_s, max(line.ttft_s for line in prompts[0]) - best[0].ttft_s
    if best[-1].input_len <= best[0].input_len or longer_s <= _LEAST_SPREAD * noise_s:
        raise ConfigError(
            f"prompts of {best[0].input_len} and {best[-1].input_len} tokens had their first tokens after "
            f"{1000 * best[0].ttft_s:.1f} and {1000 * best[-1].ttft_s:.1f} ms, but the times of the shorter ones vary "
            f"by {1000 * noise_s:.1f} ms: set a longer --longest-prompt"
        )
    token_s, _ = statistics.linear_regression([line.input_len for line in best], [line.ttft_s for line in best])
    if token_s <= 0:
        raise ConfigError("first tokens do not take longer with more tokens: is the server busy with other requests?")
    times_s = {len(lines): [line.tpot_s for line in lines if line.tpot_s] for lines in streams}
    medians = {count: statistics.median(times) for count, times in times_s.items() if times}
    if len(medians) < 2:
        raise ConfigError(
            f"too few answers had a second token, although {_OUTPUT_TOKENS} were allowed: does the model stop at once?"
        )
    sequence_s, base_s = statistics.linear_regression(list(medians), list(medians.values()))
    if sequence_s < 0 or base_s <= 0:  # within noise
        sequence_s, base_s = 0.0, statistics.fmean(medians.values())
    return StepCost(base_s, sequence_s, token_s)


async def _send(send: Send, requests: Sequence[LoadRequest]) -> list[Timeline]:
    """Send the requests concurrently. Raises Unavailable if one failed."""
    lines = await asyncio.gather(*map(send, requests))
    for line in lines:
        if line.failure is not None:
            raise Unavailable(f"a calibration request failed: {line.failure}")
    return lines


def _text(words: random.Random, length: int) -> str:
    """Return random words, so that no prefix cache has them."""
    return " ".join("".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(max(1, length)))
