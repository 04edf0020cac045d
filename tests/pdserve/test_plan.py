"""`pdserve plan`: the cost of a server's steps from times seen by its clients."""

import asyncio
import random
from dataclasses import replace
from functools import partial

import pytest

from pdserve import cli
from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.timeline import RequestFailure, Timeline
from pdserve.calibration import Send, calibrate, cost_of
from simulation.virtual_time import VirtualTimeLoop
from wire.errors import ConfigError, Unavailable
from wire.step_cost import StepCost

COST = StepCost(0.013, 0.0009, 0.0014)


class _Server:
    """Answers in the times of `cost`, with up to `noise_s` more; two tokens a word."""

    def __init__(self, cost: StepCost, noise_s: float = 0.0, num_outputs: int | None = None) -> None:
        self.cost, self.requests = cost, list[LoadRequest]()
        self._noise_s, self._num_outputs = noise_s, num_outputs
        self._now, self._numbers, self._at_once = 0, random.Random(1), 0

    async def send(self, request: LoadRequest) -> Timeline:
        self.requests.append(request)
        self._at_once += 1
        await asyncio.sleep(0)  # those sent together are here by then
        streams, length = self._at_once, 2 * len(str(request.prompt).split())
        await asyncio.sleep(0)
        self._at_once -= 1
        first_s = 0.02 + length * self.cost.token_s + self._numbers.uniform(0, self._noise_s)
        count = self._num_outputs or request.max_tokens
        end_s = first_s + (count - 1) * self.cost.decode_s(streams)
        return Timeline(0.0, 0.0, (first_s,), end_s, length, count)


@pytest.mark.parametrize("cost", [COST, StepCost(0.03, 0.0, 0.0001)])
def test_the_cost_of_a_step_is_found_from_outside(cost: StepCost) -> None:
    server = _Server(cost)

    found = asyncio.run(calibrate(server.send, 512, lambda line: None))

    assert found.token_s == pytest.approx(cost.token_s)
    assert found.base_s == pytest.approx(cost.base_s)
    assert found.sequence_s == pytest.approx(cost.sequence_s, abs=1e-12)
    assert len({request.prompt for request in server.requests}) == len(server.requests) == 1 + 12 + 15


def test_a_second_measurement_sends_other_prompts() -> None:
    server = _Server(COST)
    for _ in range(2):
        asyncio.run(calibrate(server.send, 64, lambda line: None))

    assert len({request.prompt for request in server.requests}) == 2 * (1 + 12 + 15)


def test_noise_of_a_few_milliseconds_changes_it_little() -> None:
    found = asyncio.run(calibrate(_Server(COST, noise_s=0.02).send, 512, lambda line: None))

    assert found.token_s == pytest.approx(COST.token_s, rel=0.05)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (_Server(COST, noise_s=3.0), r"the shorter ones vary by .* ms: set a longer --longest-prompt"),
        (_Server(StepCost(0.013, 0.0009, 0.0)), "prompts of 64 and 1024 tokens had their first tokens after "),
        (_Server(COST, num_outputs=1), "too few answers had a second token, although 48 were allowed"),
    ],
)
def test_times_that_show_nothing_are_refused_with_what_is_wanted(server: _Server, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asyncio.run(calibrate(server.send, 512, lambda line: None))


def test_a_calibration_takes_ten_minutes_at_most() -> None:
    async def send(request: LoadRequest) -> Timeline:
        await asyncio.sleep(22.0)  # 28 requests, in 17 turns
        return Timeline(0.0, 0.0, (0.1,), 0.2, len(str(request.prompt).split()), request.max_tokens)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        with pytest.raises(ConfigError, match="tokens had their first tokens after "):
            runner.run(calibrate(send, 512, lambda line: None))
        slow = partial(_later, 14.0, send)
        with pytest.raises(ConfigError, match="take longer than 600 s: set a shorter --longest-prompt"):
            runner.run(calibrate(slow, 512, lambda line: None))


async def _later(seconds: float, send: Send, request: LoadRequest) -> Timeline:
    await asyncio.sleep(seconds)
    return await send(request)


def test_first_tokens_that_take_no_longer_are_refused() -> None:
    times_s = {32: 0.1, 128: 0.5, 256: 0.5, 512: 0.11}
    prompts = [[Timeline(0.0, 0.0, (first_s,), first_s, length, 1)] for length, first_s in times_s.items()]

    with pytest.raises(ConfigError, match="first tokens do not take longer with more tokens"):
        cost_of(prompts, [])


def test_a_request_that_fails_ends_it() -> None:
    async def send(request: LoadRequest) -> Timeline:
        return Timeline(0.0, 0.0, failure=RequestFailure("HTTP 400", "too long"))

    with pytest.raises(Unavailable, match="a calibration request failed: HTTP 400: too long"):
        asyncio.run(calibrate(send, 512, lambda line: None))


def test_steps_that_take_less_with_more_streams_cost_nothing_for_each() -> None:
    line = Timeline(0.0, 0.0, (0.1,), 0.2, 10, 2)
    prompts = [[line], [replace(line, pieces_s=(0.5,), end_s=0.6, input_len=400)]]

    found = cost_of(prompts, [[replace(line, end_s=0.3)], [line, line]])

    assert found.base_s == pytest.approx(0.15)
    assert found.sequence_s == 0.0


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--base-url=http://127.0.0.1:1"], 1, "http://127.0.0.1:1/v1/models does not answer"),
        (["--plot=f.jpg"], 2, "--plot f.jpg: use a file that ends in .svg or .png"),
        (["--longest-prompt=63"], 2, "--longest-prompt 63: must be at least 64"),
        (["--trace=/nonexistent"], 2, "/nonexistent: No such file or directory"),
        (["--bogus=1"], 2, "unknown flag --bogus"),
        (["--url=http://127.0.0.1:1"], 2, "unknown flag --url"),
        (["--step-cost=1,1,1"], 2, "unknown flag --step-cost"),
        (["--base-url=https://127.0.0.1:1/v1"], 1, "https://127.0.0.1:1/v1/models does not answer"),
    ],
)
def test_bad_input_is_one_line(
    flags: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert cli.main(["plan", *flags]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
