"""A cluster of real processes in which one at a time is set to fail, and what is observed of it from outside."""

import asyncio
import json
import re
import shlex
import signal
import sys
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx
from tokenizers import Tokenizer, models, pre_tokenizers

from pdserve.client import parse_metrics
from pdserve.ports import free_ports
from processes.failpoints import VARIABLE
from ranktable_tools.launch_plan import resolve
from testing.engine.fake_model import FakeConfig, expected_tokens
from tests.cluster.guide import GuideCluster
from tests.faults.launch import LEASE_S
from tests.faults.stream_request import StreamResult
from wire.errors import Unavailable
from wire.types import SamplingParams

VOCAB_SIZE, CHUNK, PROMPT_TOKENS = 320, 16, 60
NUM_LAYERS, STEP_S = 2, 0.01
START_S = 300.0
_POLL_S = 0.01
_LAUNCH = Path(__file__).with_name("launch.py")
_FAULT = re.compile(r"^(\S+)Z \S+ \S+ failpoint point=(\S+) action=(\S+)", re.MULTILINE)


def make_model(folder: Path) -> Path:
    """Write the files that a fake instance and the scheduler read. Token 17 is the word `w17`, so text is tokens."""
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "fake.json").write_text(json.dumps({"step_seconds": STEP_S, "num_layers": NUM_LAYERS}))
    return folder


class FaultCluster:
    """Owns a GuideCluster whose processes have short waits (launch.py). Names are the GuideCluster's."""

    def __init__(self, folder: Path, *, pairs: int = 2, flags: Sequence[str] = ()) -> None:
        prefill, decode = [str(i) for i in range(pairs)], [str(i + pairs) for i in range(pairs)]
        flags = (
            "--engine=fake", f"--prefill-chunk-size={CHUNK}", "--log-level=DEBUG", "--stall-timeout=20",
            "--no-enable-prefix-caching", *flags,  # so that an answer shows which two instances gave it, each time
        )  # fmt: skip
        self.guide = GuideCluster(folder, make_model(folder / "model"), prefill=prefill, decode=decode, flags=flags)
        self.names = (*self.guide.names, "scheduler")
        self._http = dict(zip(self.guide.names, free_ports(len(self.guide.names)), strict=True))
        self._salts = {name: _salt(self.guide.environment(name)) for name in self.guide.names}
        self._python = launcher(folder, _LAUNCH)
        self._notified = set[str]()

    def __enter__(self) -> "FaultCluster":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.guide.processes.values():
            process.send(signal.SIGCONT)
        self.guide.__exit__(*exc)  # type: ignore[arg-type]

    @property
    def base_url(self) -> str:
        """The URL that clients use."""
        return self.guide.client.base_url

    def renew(self, victim: str, setting: str) -> None:
        """Restart every process that failed before, `victim` with this setting; wait until all live."""
        for name in {*self._notified, victim} & set(self.guide.processes):
            self.guide.kill(name)
        self._notified = {victim}
        for name in self.names:
            if name not in self.guide.processes:
                self.start(name, setting if name == victim else "")
        self.wait_living(self.guide.names)

    def bury(self, name: str) -> int:
        """Return the exit status of a process that its failpoint killed; the cluster forgets it."""
        process = self.guide.processes.pop(name)
        self.guide.retired.append(process)
        return process.wait()

    def start(self, name: str, setting: str = "") -> None:
        """Start one process."""
        flags = (f"--http-port={self._http[name]}",) if name in self._http else ()
        self.guide.start(name, env={"PDSERVE_PYTHON": self._python, VARIABLE: setting}, flags=flags)

    def wait_living(self, names: Sequence[str]) -> None:
        """Wait until the scheduler has a session with each of these and reports so."""
        ports = {str(self.guide.ports[self.guide.names.index(name)]) for name in names}
        deadline = time.monotonic() + START_S
        while not (ports <= (living := self.living()) and all("session_open" in self.log(name) for name in names)):
            for name, process in self.guide.processes.items():
                assert process.running, f"{name} ended with {process.wait()}:\n{process.log}"
            assert time.monotonic() < deadline, f"living {living}, wanted {ports}"
            time.sleep(_POLL_S)

    def living(self) -> set[str]:
        """The ports of the instances that the scheduler reports as living; none while it does not answer."""
        try:
            samples = self.guide.gauge("pdserve_instance_info")
        except Unavailable:
            return set()
        living = (sample.labels["address"] for sample in samples if sample.labels["state"] == "living")
        return {address.rpartition(":")[2] for address in living}

    def log(self, name: str) -> str:
        """All output of the process that has this name now."""
        return self.guide.processes[name].log

    def fault_at(self, name: str) -> float | None:
        """When the failpoint of this process acted first, by time.time(); None before."""
        found = _FAULT.search(self.log(name))
        return None if found is None else datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()

    def is_stopped(self, name: str) -> bool:
        """Whether SIGSTOP has stopped it."""
        stat = Path(f"/proc/{self.guide.processes[name].pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def ledger(self) -> dict[str, float]:
        """The scheduler's counts of requests, by the end of the name."""
        prefix = "pdserve_requests_"
        return {
            sample.name.removeprefix(prefix).removesuffix("_total"): sample.value
            for sample in self.guide.client.metrics()
            if sample.name.startswith(prefix) and not sample.labels and not sample.name.endswith("_created")
        }

    def is_seen_idle(self) -> bool:
        """Whether the scheduler reports every instance as holding and running nothing."""
        gauges = ("pdserve_kv_blocks_used", "pdserve_running", "pdserve_waiting")
        known = [sample.value for sample in self.guide.client.metrics() if sample.name in gauges]
        return len(known) == len(gauges) * len(self.guide.names) and not any(known)

    def blocks_used(self, name: str) -> float:
        """KV blocks that this instance holds now, by its own /metrics."""
        return self.figures(name)["pdserve_instance_blocks_used"]

    def starved_s(self, names: Sequence[str]) -> dict[str, float]:
        """Seconds during which the machine kept each of these instances from running, since it started."""
        return {name: self.figures(name)["pdserve_instance_starved_s"] for name in names}

    def figures(self, name: str) -> dict[str, float]:
        """What the instance's own /metrics shows now."""
        return _instance_metrics(self._http[name])

    def expected(self, prompt: Sequence[int], count: int) -> dict[tuple[str, str, str], list[str]]:
        """The first `count` words by (P of the first token, P of the KV that D received, D); a fault may change P.

        A real model gives one answer everywhere; a fake one's numbers show which instance computed what.
        """
        names = self.guide.names
        prefills, decodes = ([name for name in names if name.startswith(role)] for role in ("prefill", "decode"))
        answers = {}
        for first in prefills:
            (start,) = _tokens(prompt, [self._salts[first]], count=1)
            for second in prefills:
                for decode in decodes:
                    salts = [self._salts[second]] * len(prompt) + [self._salts[decode]]
                    tokens = (start, *_tokens((*prompt, start), salts, count=count - 1))
                    answers[first, second, decode] = [f"w{token}" for token in tokens]
        return answers

    def explains(self, prompt: Sequence[int], words: Sequence[str]) -> bool:
        """Whether one pair produces these words, or one produces the first of them and another one the rest."""
        answers = self.expected(prompt, len(words)).values()
        same = max(_common(answer, words) for answer in answers)
        if same == len(words):
            return True
        tokens = [int(word.removeprefix("w")) for word in words]
        prefills, decodes = (
            [salt for name, salt in self._salts.items() if name.startswith(role)] for role in ("prefill", "decode")
        )
        return same > 0 and any(
            _tokens((*prompt, *tokens[:same]), [prefill] * len(prompt) + [decode], count=len(words) - same)
            == tuple(tokens[same:])
            for prefill in prefills
            for decode in decodes
        )


async def until(condition: Callable[[], bool], deadline: float, what: str) -> float:
    """Poll in a thread until the condition holds; return that time.time(). Fails at `deadline` (time.time())."""
    while True:
        if await asyncio.to_thread(condition):
            return time.time()
        assert time.time() < deadline, what
        await asyncio.sleep(_POLL_S)


async def pools_empty(cluster: FaultCluster, names: Sequence[str], since: float, starved_s: dict[str, float]) -> float:
    """Return the time.time() at which none of these instances holds a block.

    Fails later than lease + 1 s after `since`, plus the time for which they were starved since `starved_s` was read:
    a lease counts only time in which a process could run.
    """

    def look() -> tuple[dict[str, float], float]:
        used = {name: cluster.blocks_used(name) for name in names}
        return used, max(now - starved_s[name] for name, now in cluster.starved_s(names).items())

    while True:
        used, late_s = await asyncio.to_thread(look)
        if not any(used.values()):
            return time.time()
        assert time.time() < since + LEASE_S + 1 + late_s, f"blocks are held past lease + 1 s + {late_s:g} s: {used}"
        await asyncio.sleep(_POLL_S)


def describe(results: Iterable[StreamResult]) -> str:
    """One line for each client, for a failure's message."""
    return "\n".join(f"{one.outcome} {one.tokens} {one.message}" for one in results)


def client_of(cluster: FaultCluster) -> httpx.AsyncClient:
    """A client that waits longer than any fault lasts."""
    return httpx.AsyncClient(base_url=cluster.base_url, timeout=300, trust_env=False)


def launcher(folder: Path, program: Path) -> str:
    """Write a `python` whose `-m pdserve.launch` is this program; return its path."""
    script, python = folder / "python", shlex.quote(sys.executable)
    script.write_text(
        "#!/bin/sh\n"
        f'if [ "$3" = pdserve.launch ]; then shift 3; exec {python} -P {shlex.quote(str(program))} "$@"; fi\n'
        f'exec {python} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many words both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _tokens(prompt: Sequence[int], salts: Sequence[int], *, count: int) -> tuple[int, ...]:
    config, params = FakeConfig(vocab_size=VOCAB_SIZE, num_layers=NUM_LAYERS), SamplingParams(count, temperature=0)
    return expected_tokens(config, prompt, params, count=count, salts=salts)


def _instance_metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=START_S) as answer:
        return {sample.name: sample.value for sample in parse_metrics(answer.read().decode())}


def _salt(environment: dict[str, str]) -> int:
    own = resolve(environment).own
    return zlib.crc32(f"{own.server_ip}|{own.device_ids}".encode())
