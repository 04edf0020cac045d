"""A cluster of real processes whose global table changes while it serves."""

import json
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pdserve.ports import free_ports
from testing.engine.fake_model import FakeConfig, expected_tokens
from tests.cluster.guide import GuideCluster, Process
from wire.types import SamplingParams

WAIT_S = 300.0
_POLL_S = 0.02
_GROUPS = {"prefill": 1, "decode": 2}


class LiveCluster(GuideCluster):
    """1P1D at the start. The scheduler uses NODE_PORTS; instances added later have their port in the table."""

    def __init__(self, folder: Path, model: Path, *, flags: Sequence[str] = ()) -> None:
        super().__init__(folder, model, prefill=("0",), decode=("1",), flags=flags)
        self.table: dict[str, Any] = json.loads(self.tables.global_path.read_text())
        self.port_of = dict(zip(self.names, self.ports, strict=True))

    def servers(self, role: str) -> list[dict[str, Any]]:
        """The entries of one role."""
        listed: list[dict[str, Any]] = self.table["server_group_list"][_GROUPS[role]]["server_list"]
        return listed

    def add(self, name: str, device_id: str) -> Process:
        """Add an instance at the end of its role's entries, and start its process."""
        (port,) = free_ports(1)
        ip = self.servers("prefill")[0]["server_ip"]
        entry = {
            "server_id": ip, "server_ip": ip, "server_port": str(port),
            "device": [{"device_id": device_id, "device_ip": ip, "rank_id": "0"}],
        }  # fmt: skip
        self.servers(name.partition("-")[0]).append(entry)
        self.publish()
        local = self.folder / f"local-{name}.json"
        whole = {"version": "1.0", "status": "completed", "group_id": "0", "server_count": "1", "server_list": [entry]}
        local.write_text(json.dumps(whole))
        env = {"GLOBAL_RANK_TABLE_FILE_PATH": str(self.tables.global_path), "RANK_TABLE_FILE_PATH": str(local)}
        flags = (*self.flags, "--host=0.0.0.0", f"--port={port}")
        self.port_of[name] = port
        self.processes[name] = Process(self.folder / f"{name}.log", env, flags)
        return self.processes[name]

    def publish(self, **changes: object) -> None:
        """Replace the global table by a rename."""
        for group in self.table["server_group_list"]:
            group["server_count"] = str(len(group["server_list"]))
        replace(self.tables.global_path, json.dumps({**self.table, **changes}))

    def states(self) -> dict[str, str]:
        """State by name, as the scheduler has it."""
        return {one["name"]: one["state"] for one in self.client.get("/ready").json()["instances"]}

    def wait_states(self, wanted: dict[str, str]) -> None:
        """Return when the scheduler has these and no others."""
        deadline = time.monotonic() + WAIT_S
        while (states := self.states()) != wanted:
            assert time.monotonic() < deadline, f"{states}, wanted {wanted}"
            time.sleep(_POLL_S)

    def wait_running(self, name: str, minimum: int) -> None:
        """Return when an instance runs that many sequences."""
        deadline, port = time.monotonic() + WAIT_S, f":{self.port_of[name]}"
        while True:
            running = [one.value for one in self.gauge("pdserve_running") if one.labels["instance"].endswith(port)]
            if running and running[0] >= minimum:
                return
            assert time.monotonic() < deadline, f"{name} runs {running}, wanted {minimum}"
            time.sleep(_POLL_S)

    def wait_log(self, name: str, words: str) -> None:
        """Return when a process has logged this."""
        deadline = time.monotonic() + WAIT_S
        while words not in self.processes[name].log:
            assert time.monotonic() < deadline, self.processes[name].log
            time.sleep(_POLL_S)

    def version(self) -> tuple[float, str]:
        """Version and digest of the table in use."""
        (sample,) = self.gauge("pdserve_table_version")
        return sample.value, sample.labels["digest"]

    def count(self, name: str) -> float:
        """A counter of the scheduler."""
        (sample,) = self.gauge(f"pdserve_{name}_total")
        return sample.value


def replace(path: Path, text: str) -> None:
    """Replace a file by a rename."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


def fake_words(
    host: str, prompt: Sequence[int], count: int, devices: Iterable[tuple[str, str]], config: FakeConfig
) -> dict[tuple[str, str], str]:
    """Return the answer of each pair of (prefill device, decode device): a fake's numbers show who computed what."""
    params, answers = SamplingParams(count, temperature=0), {}
    for start, end in devices:
        salts = [zlib.crc32(f"{host}|{(device,)}".encode()) for device in (start, end)]
        whole = [salts[0]] * len(prompt) + [salts[1]]
        tokens = expected_tokens(config, prompt, params, count=count, salts=whole)
        answers[start, end] = " ".join(f"w{token}" for token in tokens)
    return answers
