"""A cluster over several hosts as the guide starts it, and one more host with the clients: each has its own tables.

However a test ends, leaving the `with` stops all processes and ends the hosts.
"""

import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from pdserve.client import Client, Sample
from pdserve.readiness import check_ready
from ranktable_tools.secret import SECRET_NAME
from tests.cluster.guide import CLONE, START_TIMEOUT_S, STOP_TIMEOUT_S, Process
from tests.cluster.hosts import Network

RANKTABLE = (sys.executable, "-P", "-m", "ranktable_tools.cli")
MERGE = (*RANKTABLE, "merge")
GUIDE_MERGE = (sys.executable, str(CLONE / "deploy" / "PD_separate" / "pd_ranktable_tools.py"), "--mode", "merge")
"""The guide's writes the table alone, ours a cluster secret too."""
FIRST_PORT, SCHEDULER_PORT = 8088, 9000
"""The guide's; they may be taken on this machine, for every host has its own."""
_POLL_S = 0.02
_DEVICES = {"prefill": "4,5", "decode": "6,7"}


class HostCluster:
    """Its hosts are those of its instances (`prefill`, `decode`, with a number or without), `scheduler` and `clients`.

    Those of `late` are there from the start and belong to the cluster when they join. Owns the hosts and the processes.
    """

    def __init__(
        self, folder: Path, model: Path, flags: Sequence[str], instances: Sequence[str] = ("prefill", "decode"),
        late: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.folder = folder
        self.instances = tuple(instances)
        self.ports = {name: FIRST_PORT + number for number, name in enumerate(instances)}
        self.network = Network((*instances, *late, "scheduler", "clients"))
        self.flags = ("--model", str(model), "--served-model-name", "tiny", "--host=0.0.0.0", *flags)
        self.processes: dict[str, Process] = {}
        self.base_url = f"http://{self.network.address_by_name['scheduler']}:{SCHEDULER_PORT}"
        self.client = Client(self.base_url, timeout_s=300.0)
        self._ends = ExitStack()

    def __enter__(self) -> "HostCluster":
        self._ends.enter_context(self.network)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ends:
            logs = {name: process.log for name, process in self.processes.items()}
            statuses = {name: self._stop(process) for name, process in reversed(self.processes.items())}
            if error is not None:
                error.add_note("\n".join(f"--- {name} ---\n{log}" for name, log in logs.items()))
            else:
                assert set(statuses.values()) <= {0}, (statuses, logs)

    @property
    def members(self) -> tuple[str, ...]:
        """The hosts in the table."""
        return (*self.instances, "scheduler")

    @contextmanager
    def as_client(self) -> Iterator[Client]:
        """Let this thread's new connections start at the clients' host."""
        with self.network.hosts["clients"].entered():
            yield self.client

    def generate(self) -> None:
        """Run `ranktable gen` on every host, which finds its own address."""
        for name in self.members:
            self.network.hosts[name].run(
                *RANKTABLE, "gen", *_lists(name), "--save-dir", ".", cwd=self._own_folder(name)
            )

    def merge(self, *command: str) -> str:
        """Collect the hosts' tables on the scheduler's, merge them there, copy it to all; return merge's output."""
        desk = self.folder / "desk"
        desk.mkdir(exist_ok=True)
        parts = []
        for name in self.members:
            parts.append(f"global_ranktable_{self.network.address_by_name[name]}.json")
            shutil.copy(self.folder / name / parts[-1], desk)
        listed = ("--global-ranktable-list", *parts, "--save-dir", ".")
        printed = self.network.hosts["scheduler"].run(*command, *listed, cwd=desk)
        for name in {*self.members, *self.processes}:
            for file in (SECRET_NAME, "global_ranktable_merge.json"):
                if (desk / file).exists():
                    shutil.copy(desk / file, self.folder / name / "copied")
                    (self.folder / name / "copied").replace(self.folder / name / file)
        return printed

    def up(self) -> "HostCluster":
        """Start a process on each host by start_servers.sh and wait until the cluster is ready."""
        for name in self.members:
            self._start(name)
        self.wait("ready", lambda: check_ready(self.client)[0])
        return self

    def join(self, name: str) -> None:
        """Add a late host to the cluster while it serves: run gen there with its port, merge again, start it."""
        self.ports[name] = FIRST_PORT + len(self.ports)
        words = (*_lists(name), "--ports", str(self.ports[name]), "--save-dir", ".")
        self.network.hosts[name].run(*RANKTABLE, "gen", *words, cwd=self._own_folder(name))
        self.instances = (*self.instances, name)
        self.merge(*MERGE)
        self._start(name)

    def leave(self, name: str) -> Process:
        """Merge again without this host; return its process, which ends by itself."""
        self.instances = tuple(one for one in self.instances if one != name)
        self.merge(*MERGE)
        return self.processes.pop(name)

    def states(self) -> dict[str, str]:
        """The state of each instance that the scheduler reports, by its host's address."""
        with self.as_client() as client:
            instances = client.get("/ready").json()["instances"]
        return {one["address"].partition(":")[0]: one["state"] for one in instances}

    def gauge(self, name: str) -> list[Sample]:
        """Return the samples of one metric."""
        with self.as_client() as client:
            return [sample for sample in client.metrics() if sample.name == name]

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the condition holds, seen from the clients' host; a process that ends before is an error."""
        deadline = time.monotonic() + timeout_s
        with self.as_client():
            while not condition():
                for name, process in self.processes.items():
                    assert process.running, f"{name} ended with {process.wait()}:\n{process.log}"
                assert time.monotonic() < deadline, f"not {what} after {timeout_s} s"
                time.sleep(_POLL_S)

    def ledger(self) -> dict[str, float]:
        """The scheduler's counts of requests: received, and by outcome."""
        with self.as_client() as client:
            samples = {sample.name: sample.value for sample in client.metrics() if not sample.labels}
        kinds = ("received", "completed", "failed", "cancelled", "rejected")
        return {kind: samples[f"pdserve_requests_{kind}_total"] for kind in kinds}

    def wait_idle(self) -> None:
        """Return when no instance holds a block and no request is in progress."""
        names = ("pdserve_kv_blocks_used", "pdserve_requests_inflight")
        self.wait("idle", lambda: not any(one.value for one in self.client.metrics() if one.name in names), 30.0)

    def _environment(self, name: str) -> dict[str, str]:
        address = self.network.address_by_name[name]
        end = "host" if name == "scheduler" else _DEVICES[name.rstrip("0123456789")].replace(",", "")
        return {
            "GLOBAL_RANK_TABLE_FILE_PATH": "global_ranktable_merge.json",
            "RANK_TABLE_FILE_PATH": f"local_ranktable_{address}_{end}.json",
            "NODE_PORTS": ",".join(map(str, self.ports.values())),
            "USE_OPENAI": "1",
        }

    def _start(self, name: str) -> None:
        port = self.ports.get(name, SCHEDULER_PORT)
        self.processes[name] = Process(
            self.folder / name / "log", self._environment(name), (*self.flags, f"--port={port}"),
            self.network.hosts[name].before,
        )  # fmt: skip

    def _own_folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def _stop(self, process: Process) -> int:
        process.send(signal.SIGTERM)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except AssertionError:
            process.send(signal.SIGKILL)
            return process.wait()


def _lists(name: str) -> tuple[str, ...]:
    """The lists that gen gets on this host."""
    if name == "scheduler":
        return ("--api-server",)
    role = name.rstrip("0123456789")
    return (f"--{role}-server-list", _DEVICES[role])
