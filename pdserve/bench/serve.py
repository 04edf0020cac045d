"""`pdserve bench serve`: send a load to an OpenAI server and report the figures."""

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import aiohttp

from pdserve.bench.load.arrivals import arrival_times
from pdserve.bench.load.client_cpu import ClientCpu, cpu_s
from pdserve.bench.load.dialect import ApiDialect, Chat, Completions, Embeddings
from pdserve.bench.load.drive import drive
from pdserve.bench.load.endpoint import NO_CONNECTION, Endpoint
from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.plot import plot
from pdserve.bench.load.progress_line import LiveLine
from pdserve.bench.load.record import LoadRecord
from pdserve.bench.load.report import report
from pdserve.bench.load.result import measured
from pdserve.bench.load.session import get_json, open_session
from pdserve.bench.load.summary import summarize
from pdserve.bench.load.timeline import Timeline
from pdserve.bench.serve_metadata import about, file_name
from pdserve.bench.serve_options import ServeOptions, parse
from pdserve.bench.serve_requests import make_requests
from pdserve.target_cluster import START_HINT
from pdserve.termination import unwind_on_sigterm
from pdserve.written_file import write_file
from scheduler.loop import run
from wire.errors import ConfigError, Unavailable

_INTERRUPTED = 130
_READY_POLL_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 on success, 130 after Ctrl-C, which prints the results so far.

    Raises Unavailable, with the reasons, if no request completed.
    """
    options = parse(argv)
    arrival_times(0, options.request_rate, options.burstiness, random.Random(0))
    unwind_on_sigterm()
    bench = _Bench(options)
    status = 0
    try:
        run(bench.run())
    except KeyboardInterrupt:
        if not bench.is_measuring:
            raise
        status = _INTERRUPTED
    bench.print_results()
    if not status:
        bench.check()
    return status


class _Bench:
    """One run. Owns the measurements, so that they survive an interrupted run."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self.record = LoadRecord(options.num_prompts)
        self._model = options.requested_model
        self._client = ClientCpu(0.0, 0.0)

    @property
    def is_measuring(self) -> bool:
        """Whether the load has begun."""
        return self._client.wall_s > 0

    async def run(self) -> None:
        """Find the model, make the requests and send them. Raises ConfigError, Unavailable."""
        options = self._options
        async with open_session(options.headers, options.request_timeout, os.environ) as http:
            try:
                await _wait_ready(http, options)
                self._model, folder = await _find_model(http, options)
            except Unavailable as error:
                raise _with_advice(error) from error.__cause__
            requests = await make_requests(options, http, self._model, folder)
            endpoint = Endpoint(http, options.url, _make_dialect(options, self._model))
            await _warm_up(endpoint, requests, options.num_warmups)
            await self._measure(endpoint, requests)

    async def _measure(self, endpoint: Endpoint, requests: Sequence[LoadRequest]) -> None:
        options = self._options
        times_s = arrival_times(
            len(requests), options.request_rate, options.burstiness, random.Random(options.seed + 1)
        )

        async def send(number: int, request: LoadRequest, due_s: float) -> Timeline:
            return await endpoint.send(request, due_s)

        live = LiveLine(len(requests), shown=not options.disable_tqdm)
        began_cpu_s, began_s = cpu_s(), time.perf_counter()
        try:
            await drive(
                requests, times_s, send, self.record, clock=time.perf_counter, max_concurrency=options.max_concurrency,
                seen=live.see,
            )  # fmt: skip
        finally:
            self._client = ClientCpu(cpu_s() - began_cpu_s, time.perf_counter() - began_s)
            live.close()

    def print_results(self) -> None:
        """Print the results and write the requested files. Raises ConfigError if a file cannot be written."""
        options, record = self._options, self.record
        summary = summarize(record, options.metrics, options.metric_percentiles, options.goals)
        for line in report(record, summary, self._client, options.goals, pooled=options.is_pooled):
            print(line, flush=True)
        now = datetime.now()
        if options.save_result:
            model = options.model or self._model
            result = about(options, model, now)
            result |= measured(record, summary, self._client, detailed=options.save_detailed, pooled=options.is_pooled)
            path, line = Path(options.result_dir) / file_name(options, model, now), json.dumps(result) + "\n"
            write_file(path, line.encode(), appends=options.append_result)
        if options.plot:
            path, title = Path(options.plot), f"{self._model}, {options.url}"
            write_file(path, plot(record.in_order, title=title, file_type=path.suffix.removeprefix(".")))

    def check(self) -> None:
        """Raise Unavailable if no request completed."""
        lines = self.record.lines.values()
        if any(line.failure is None for line in lines):
            return
        requests = "the only request" if len(lines) == 1 else f"none of the {len(lines)} requests"
        what = f"{requests} to {self._options.url}"
        message = f"nothing was measured: {what} {'failed' if len(lines) == 1 else 'completed'}"
        raise Unavailable(f"{message}; {START_HINT}" if self.record.errors().keys() == {NO_CONNECTION} else message)


async def _wait_ready(http: aiohttp.ClientSession, options: ServeOptions) -> None:
    """Wait up to --ready-check-timeout-sec for /v1/models. Raises Unavailable with the last error."""
    deadline_s = time.perf_counter() + options.ready_check_timeout_sec
    while options.ready_check_timeout_sec > 0:
        try:
            await get_json(http, f"{options.url}/v1/models")
            return
        except Unavailable as error:
            if time.perf_counter() + _READY_POLL_S > deadline_s:
                message = f"{error} (--ready-check-timeout-sec {options.ready_check_timeout_sec})"
                raise Unavailable(message) from error.__cause__
        await asyncio.sleep(_READY_POLL_S)


def _with_advice(error: Unavailable) -> Unavailable:
    """Return the error, with advice if nothing listens at the URL."""
    is_refused = isinstance(error.__cause__, aiohttp.ClientConnectorError)
    return Unavailable(f"{error}; {START_HINT}") if is_refused else error


async def _find_model(http: aiohttp.ClientSession, options: ServeOptions) -> tuple[str, str]:
    """Return the served name to request, and its folder as reported by the server, or ""."""
    requested = options.requested_model
    if requested and options.vocab_size:
        return requested, ""
    try:
        cards = (await get_json(http, f"{options.url}/v1/models")).get("data") or []
    except Unavailable:
        if not requested:
            raise
        return requested, ""
    for card in cards:
        if requested in ("", card.get("id")):
            return str(card["id"]), str(card.get("root") or "")
    if not requested:
        raise ConfigError(f"{options.url}/v1/models lists no model: set --model")
    return requested, ""


def _make_dialect(options: ServeOptions, model: str) -> ApiDialect:
    where = {"path": options.endpoint} if options.endpoint else {}
    if options.is_pooled:
        return Embeddings(model, options.extra_fields, **where)
    fields = {**options.sampling_fields, **options.extra_fields}
    return (Chat if options.backend == "openai-chat" else Completions)(model, fields, **where)


async def _warm_up(endpoint: Endpoint, requests: Sequence[LoadRequest], count: int) -> None:
    for line in await asyncio.gather(*(endpoint.send(requests[i % len(requests)]) for i in range(count))):
        if line.failure is not None:
            raise Unavailable(f"a warm-up request (--num-warmups) failed: {line.failure}")
