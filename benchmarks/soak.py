"""Run a cluster under mixed load for minutes: all requests must end, equal ones with equal answers; nothing may grow.

    python benchmarks/soak.py                                     10 minutes, two prefill and two decode instances
    python benchmarks/soak.py --minutes 60 --kill-every 30        an instance killed every 30 s if all serve
    python benchmarks/soak.py --minutes 60 --freeze-every 30      an instance stopped for 10 s every 30 s, then resumed
    python benchmarks/soak.py --minutes 1 --prefill 1 --decode 1 --up-flags="--kv-cache-memory 32MiB"

Clients send requests one after another, without a pause: greedy and seeded streams, long prompts, schemas, several
choices, vectors, bad bodies, and requests whose client disconnects (benchmarks/soaking/requests.py). In float32 the
same body always has the same answer, on any pair of instances and alongside any other requests. When the time is up,
the clients end and the cluster is checked:

    outcomes  none `wrong`, none `unfinished`; `failed` (an error with a message) only if instances are killed or
              stopped
    idle      every gauge of work is back at zero, and all received requests have ended
    growth    memory, descriptors and threads of each process of which there are 60 snapshots or more (two minutes),
              from the second quarter of them to the last: at most --most-growth, one descriptor for each client, and
              one thread
    leftovers nothing in shared memory and no process after `pdserve down`

It prints one JSON line; the exit status is 1 if one of these checks fails.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp

from benchmarks.soaking.requests import FAILED, KINDS, UNFINISHED, WEIGHTS, WRONG, Outcome, SoakClient
from benchmarks.soaking.snapshots import ProcessSample, all_living, growth, not_idle, sample_processes, shared_names
from pdserve.client import Client
from pdserve.ports import free_ports
from pdserve.run_folder import RunFolder
from pdserve.status_line import StatusLine
from wire.errors import PdserveError

DEADLINE_S, IDLE_S, LOOK_S = 120.0, 30.0, 2.0
FROZEN_S = 10.0  # longer than the silence after which an instance is lost
MIN_LOOKS = 60  # with fewer, the second quarter, the baseline, may still show the growth of the start
MAX_WORDS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print, and return the exit status."""
    args = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the cluster is stopped
    shared_before = shared_names()
    with tempfile.TemporaryDirectory() as path:
        folder, (port,) = RunFolder(Path(path)), free_ports(1)
        try:
            pdserve(
                "up", "--detach", "--run-dir", path, "--port", str(port), "--prefill", str(args.prefill), "--decode",
                str(args.decode), "--dtype", "float32", "--max-restarts", "1000000", *shlex.split(args.up_flags),
                *(["--model", args.model] if args.model else []),
            )  # fmt: skip
            soak = Soak(args, folder, f"http://127.0.0.1:{port}")
            row = asyncio.run(soak.run())
            state = folder.read()
        finally:
            pdserve("down", "--run-dir", path)
        row["left_behind"] = {
            "shared_memory": sorted(shared_names() - shared_before),
            "processes": [one.name for one in state.living()] if state else [],
        }
    row["held"] = holds(row, args)
    print(json.dumps(row))
    return 0 if all(row["held"].values()) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12, help="concurrent requests (default: 12)")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--model", help="folder of the model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--kill-every", type=float, default=0.0, metavar="S", help="kill an instance every S seconds")
    parser.add_argument(
        "--freeze-every",
        type=float,
        default=0.0,
        metavar="S",
        help=f"stop an instance for {FROZEN_S:g} s every S seconds",
    )
    parser.add_argument("--only", choices=sorted(KINDS), nargs="+", help="only these kinds of requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--most-growth", type=int, default=64, metavar="MIB", help="allowed growth of one process (default: 64)"
    )
    parser.add_argument("--up-flags", default="--kv-cache-memory 64MiB", help="more flags of `pdserve up`")
    return parser.parse_args(arguments)


def holds(row: dict[str, Any], args: argparse.Namespace) -> dict[str, bool]:
    """Return whether each check passed."""
    grown = [one for samples in row["growth"].values() for one in samples]
    return {
        "every answer the same": not row["outcomes"].get(WRONG),
        "every request ended": not row["outcomes"].get(UNFINISHED),
        "no error without a fault": bool(args.kill_every or args.freeze_every) or not row["outcomes"].get(FAILED),
        "idle afterwards": not row["not_idle"],
        "no growth": all(
            one["resident_mib"] <= args.most_growth and one["threads"] <= 1 and one["descriptors"] <= args.clients
            for one in grown
        ),
        "nothing left behind": not any(row["left_behind"].values()),
    }


class Soak:
    """One run; owns its observations."""

    def __init__(self, args: argparse.Namespace, folder: RunFolder, url: str) -> None:
        self.args, self.folder, self.url = args, folder, url
        self.client = Client(url, timeout_s=DEADLINE_S)
        self.rng = random.Random(args.seed)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.words: list[str] = []
        self.samples: dict[tuple[str, tuple[int, int]], list[ProcessSample]] = {}
        self.kills = self.freezes = 0

    async def run(self) -> dict[str, Any]:
        """Send requests until the time is up; then wait until the cluster should be idle, and check it."""
        until, started = time.monotonic() + 60 * self.args.minutes, time.monotonic()
        helpers = [asyncio.create_task(self.watch(until))]
        for every_s, fault in ((self.args.kill_every, self.kill), (self.args.freeze_every, self.freeze)):
            if every_s:
                helpers.append(asyncio.create_task(self.disturb(until, every_s, fault)))
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, timeout=timeout, connector=connector) as session:
            client = SoakClient(session, await self.model(session), self.rng, DEADLINE_S)
            await asyncio.gather(*(self.ask(client, until) for _ in range(self.args.clients)))
        seconds = time.monotonic() - started
        await asyncio.gather(*helpers)
        left = await self.idle()
        return self.row(seconds, left)

    async def model(self, session: aiohttp.ClientSession) -> str:
        """Return the served model's name."""
        async with session.get("/v1/models") as response:
            return str((await response.json())["data"][0]["id"])

    async def ask(self, client: SoakClient, until: float) -> None:
        """Run one client, which sends its next request when the last one has ended."""
        kinds = self.args.only or list(KINDS)
        weights = [WEIGHTS[kind] for kind in kinds]
        while time.monotonic() < until:
            self.note(await client.ask(self.rng.choices(kinds, weights)[0]))

    def note(self, outcome: Outcome) -> None:
        """Count an outcome; keep the messages of the first failures."""
        self.outcomes[outcome.kind, outcome.how] += 1
        if outcome.message and outcome.how in (WRONG, UNFINISHED, FAILED):
            line = f"{outcome.kind} {outcome.how}: {outcome.message}"
            if len(self.words) < MAX_WORDS and line not in self.words:
                self.words.append(line)

    async def watch(self, until: float) -> None:
        """Take snapshots of the processes and print the progress."""
        with StatusLine() as progress:
            while time.monotonic() < until:
                looks = await asyncio.to_thread(sample_processes, self.folder)
                for one in looks:
                    self.samples.setdefault((one.name, one.pid_and_start), []).append(one)
                total = sum(one.resident_bytes for one in looks) >> 20
                by_how = Counter[str]()
                for (_, how), count in self.outcomes.items():
                    by_how[how] += count
                counts = ", ".join(f"{count} {how}" for how, count in by_how.items())
                line = f"{max(0.0, until - time.monotonic()):5.0f} s left: {counts or 'nothing ended yet'}; {total} MiB"
                progress.show(line)
                await asyncio.sleep(LOOK_S)

    async def disturb(self, until: float, every_s: float, fault: Callable[[int], Awaitable[None]]) -> None:
        """Inject a fault into an instance every `every_s` seconds if all serve, the last early enough to recover."""
        while time.monotonic() + 2 * every_s < until:
            await asyncio.sleep(every_s)
            if not await asyncio.to_thread(all_living, self.client, self.args.prefill + self.args.decode):
                continue
            state = self.folder.read()
            instances = [one for one in state.living() if one.role != "scheduler"] if state else []
            if instances:
                await fault(self.rng.choice(instances).pid)

    async def kill(self, pid: int) -> None:
        """Kill a process."""
        os.kill(pid, signal.SIGKILL)
        self.kills += 1

    async def freeze(self, pid: int) -> None:
        """Stop a process for FROZEN_S; ignore it if it was killed meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self.freezes += 1
            await asyncio.sleep(FROZEN_S)
            os.kill(pid, signal.SIGCONT)

    async def idle(self) -> dict[str, float]:
        """Return the gauges that are not back at zero after the time allowed for it."""
        until, left = time.monotonic() + IDLE_S, {"no answer": 1.0}
        while left and time.monotonic() < until:
            await asyncio.sleep(0.5)
            try:
                left = await asyncio.to_thread(not_idle, self.client)
            except PdserveError as error:
                left = {str(error): 1.0}
        return left

    def row(self, seconds: float, left: dict[str, float]) -> dict[str, Any]:
        """Return the observations as one row."""
        outcomes, kinds = Counter[str](), dict[str, dict[str, int]]()
        for (kind, how), count in sorted(self.outcomes.items()):
            outcomes[how] += count
            kinds.setdefault(kind, {})[how] = count
        grown: dict[str, list[dict[str, int]]] = {}
        for (name, _), looks in self.samples.items():
            if len(looks) < MIN_LOOKS:
                continue
            by = growth(looks)
            grown.setdefault(name, []).append({
                "looks": len(looks), "resident_mib": by["resident_bytes"] >> 20, "descriptors": by["descriptors"],
                "threads": by["threads"],
            })  # fmt: skip
        return {
            "measure": "soak", "seconds": round(seconds), "requests": sum(outcomes.values()), "kills": self.kills,
            "freezes": self.freezes, "outcomes": dict(outcomes), "kinds": kinds, "words": self.words, "not_idle": left,
            "growth": grown,
        }  # fmt: skip


def pdserve(*arguments: str) -> None:
    """Run a command of pdserve."""
    subprocess.run([sys.executable, "-P", "-m", "pdserve", *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
