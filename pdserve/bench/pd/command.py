"""`pdserve bench pd`: compare P/D with colocated instances on the same cores."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp

from pdserve.bench.load.client_cpu import ClientCpu, cpu_s
from pdserve.bench.load.dialect import Completions
from pdserve.bench.load.endpoint import Endpoint
from pdserve.bench.load.session import get_json, open_session
from pdserve.bench.pd import table
from pdserve.bench.pd.contestants import ServerContestant, our_colocated, our_pair, vllm
from pdserve.bench.pd.loads import WARM_UP, Load, all_loads, send_load
from pdserve.bench.pd.options import PdRequest, parse
from pdserve.bench.pd.outcome import BenchOutcome, medians, outcome
from pdserve.bench.pd.request_routes import PairWithoutProxy, RequestRoute, RoundRobin
from pdserve.bench.pd.start import started
from pdserve.bench.pd.utilisation import read_counters, utilisation_between
from pdserve.bench.serve_requests import vocabulary
from pdserve.client import Client
from pdserve.termination import unwind_on_sigterm
from pdserve.work_folder import work_folder
from scheduler.loop import run
from scheduler.model.files import read_model_files
from wire.errors import ConfigError, Unavailable

_TIMEOUT_S = 600.0
_MAX_LEN = 2048


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 if a request failed."""
    request = parse(argv)
    loads = chosen(request)
    unwind_on_sigterm()
    say(f"{request.model.name}, {len(request.cores)} cores, rounds: {request.options.rounds}")
    outcomes: list[BenchOutcome] = []
    try:
        for number in range(request.options.rounds):
            outcomes += _one_round(request, loads, number)
    finally:
        if outcomes:
            _print_results(request, medians(outcomes))
    return 1 if any(one.failed for one in outcomes) else 0


def chosen(request: PdRequest) -> tuple[Load, ...]:
    """Return the loads of --quick and --only. Raises ConfigError if none is left or one is too long."""
    options = request.options
    every = all_loads(quick=options.quick)
    loads = tuple(load for load in every if not options.only or any(part in load.name for part in options.only))
    if not loads:
        raise ConfigError(f"--only {' '.join(options.only)} matches none of: {'; '.join(load.name for load in every)}")
    longest = max(load.longest for load in loads)
    maximum = _max_len(request)
    if longest > maximum:
        raise ConfigError(
            f"the longest request has {longest} tokens, but the limit of {request.model} is {maximum}"
            + ("" if options.quick else ": try --quick")
        )
    return loads


def say(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def _max_len(request: PdRequest) -> int:
    return read_model_files(str(request.model), None).max_model_len


def _one_round(request: PdRequest, loads: Sequence[Load], number: int) -> Iterator[BenchOutcome]:
    with work_folder("bench") as work:
        for place, contestant in enumerate(_contestants(request, work)):
            with started(contestant, work / f"contestant-{place}", request.options.startup_timeout, say):
                yield from run(_measure(contestant, loads, request, request.options.seed + number))


def _contestants(request: PdRequest, work: Path) -> Iterator[ServerContestant]:
    for path in ("handoff", "auto"):
        yield our_pair(work, request.flags, request.device, path=path)
    yield our_colocated(request.flags, request.cores, request.device)
    if request.options.vllm:
        maximum = min(_MAX_LEN, _max_len(request))
        for pair in (True, False):
            yield vllm(request.options.vllm, request.model, request.dtype, maximum, request.cores, pair=pair)


async def _measure(
    contestant: ServerContestant, loads: Sequence[Load], request: PdRequest, seed: int
) -> list[BenchOutcome]:
    async with open_session({}, _TIMEOUT_S, os.environ) as http:
        route = await _make_route(contestant, http)
        warm = await send_load(WARM_UP, route, vocabulary(str(request.model)), seed, time.perf_counter)
        failed = [timeline.failure for timeline in warm.watched if timeline.failure is not None]
        if failed:
            raise Unavailable(f"{contestant.name} does not answer: {failed[0]}")
        outcomes = []
        for load in loads:
            outcomes.append(await _one_load(contestant, load, route, vocabulary(str(request.model)), seed))
            say(f"{contestant.name}: {load.name}: {outcomes[-1].figures['output_tokens_per_s']:.0f} out tok/s")
        return outcomes


async def _one_load(
    contestant: ServerContestant, load: Load, route: RequestRoute, num_ids: int, seed: int
) -> BenchOutcome:
    client = Client(contestant.urls[0])
    before = read_counters(client.metrics()) if contestant.is_ours else None
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    sent = await send_load(load, route, num_ids, seed, time.perf_counter)
    wall_s, used_cpu_s = time.perf_counter() - began_s, cpu_s() - began_cpu_s
    use = None if before is None else utilisation_between(before, read_counters(client.metrics()), wall_s)
    return outcome(contestant.name, load, sent, use, ClientCpu(used_cpu_s, wall_s).share)


async def _make_route(contestant: ServerContestant, http: aiohttp.ClientSession) -> RequestRoute:
    endpoints = []
    for url in contestant.urls:
        cards = (await get_json(http, f"{url}/v1/models")).get("data")
        dialect = Completions(cards[0]["id"], {"ignore_eos": True})
        endpoints.append(Endpoint(http, url, dialect))
    return PairWithoutProxy(*endpoints) if contestant.hands_off else RoundRobin(endpoints)


def _print_results(request: PdRequest, outcomes: Sequence[BenchOutcome]) -> None:
    for line in table.lines(outcomes):
        print(line)
    if request.options.json:
        path = Path(request.options.json)
        about = {"model": request.model.name, "cores": len(request.cores), "rounds": request.options.rounds}
        try:
            path.write_text(json.dumps({**about, "outcomes": table.as_json(outcomes)}) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {path} cannot be written: {error}") from error
