"""Measure from outside what the steps of any OpenAI server cost: times to first tokens, and times of tokens.

time to the first token = something + prompt tokens x token
time of a token         = base + streams at once x sequence
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

_REPEATS = 3
_STREAMS = (1, 2, 4, 8)
_OUTPUT_TOKENS = 48
_LEAST_SPREAD = 2.0
"""Times for the longest prompts have to differ from those for the shortest by so many times what these differ by."""


async def calibrate(send: Send, num_words: int, show: Callable[[str], None]) -> StepCost:
    """Send some thirty requests, with prompts of up to `num_words` random words; `show` gets lines of progress.

    Raises Unavailable for one that fails, ConfigError where the times do not show what a prompt token costs.
    """
    words = random.Random()  # noqa: S311 - no secrets; other words each time, as the server caches those of the last
    prompts, streams = [], []
    await _send(send, [LoadRequest(_text(words, 8), 8)])
    for length in (num_words // 16, num_words // 4, num_words // 2, num_words):
        show(f"measuring first tokens of {length} words")
        requests = [LoadRequest(_text(words, length), 1) for _ in range(_REPEATS)]
        prompts.append([line for request in requests for line in await _send(send, [request])])
    for count in _STREAMS:
        show(f"measuring tokens of {count} streams at once")
        requests = [LoadRequest(_text(words, 8), _OUTPUT_TOKENS) for _ in range(count)]
        streams.append(await _send(send, requests))
    return cost_of(prompts, streams)


def cost_of(prompts: Sequence[Sequence[Timeline]], streams: Sequence[Sequence[Timeline]]) -> StepCost:
    """Return the cost that explains the shortest time to a first token of each prompt length, and the times of tokens.

    `prompts` are several requests of each length, the shortest first; `streams` those of each number at once. Raises
    ConfigError where the lengths or times differ too little.
    """
    best = [min(lines, key=lambda line: line.ttft_s) for lines in prompts]
    longer_s, noise_s = best[-1].ttft_s - best[0].ttft_s, max(line.ttft_s for line in prompts[0]) - best[0].ttft_s
    if best[-1].input_len <= best[0].input_len or longer_s <= _LEAST_SPREAD * noise_s:
        raise ConfigError(
            f"first tokens took {1000 * longer_s:.1f} ms longer for {best[-1].input_len} tokens than for "
            f"{best[0].input_len}, which alone vary by {1000 * noise_s:.1f} ms: give longer prompts (--longest-prompt)"
        )
    token_s, _ = statistics.linear_regression([line.input_len for line in best], [line.ttft_s for line in best])
    if token_s <= 0:
        raise ConfigError("first tokens do not take longer with more tokens: is the server serving others meanwhile?")
    times_s = {len(lines): [line.tpot_s for line in lines if line.tpot_s] for lines in streams}
    medians = {count: statistics.median(times) for count, times in times_s.items() if times}
    if len(medians) < 2:
        raise ConfigError(f"no answer had a second token, with {_OUTPUT_TOKENS} allowed: does the model stop at once?")
    sequence_s, base_s = statistics.linear_regression(list(medians), list(medians.values()))
    if sequence_s < 0 or base_s <= 0:  # within noise
        sequence_s, base_s = 0.0, statistics.fmean(medians.values())
    return StepCost(base_s, sequence_s, token_s)


async def _send(send: Send, requests: Sequence[LoadRequest]) -> list[Timeline]:
    """Send these at once. Raises Unavailable for one that failed."""
    lines = await asyncio.gather(*map(send, requests))
    for line in lines:
        if line.failure is not None:
            raise Unavailable(f"a request of the calibration failed: {line.failure}")
    return lines


def _text(words: random.Random, length: int) -> str:
    """Return random words, so that no cache has their prefix."""
    return " ".join("".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(max(1, length)))
