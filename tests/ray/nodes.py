"""A Ray cluster of several nodes on this machine, by Ray's own test cluster, in a process of its own.

python nodes.py     a head without resources; then one command and one answer per line:
add {"num_cpus": 2}  -> the new node's id        kill NODE_ID  -> ok, its raylet has got SIGKILL
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 127.0.0.1 and no other address
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
}
_QUICK = {
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}  # fmt: skip


class RayNodes:
    """A test's handle of the cluster, which has its own folder: Ray's sockets need a short path."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
        (self._folder / "ray").mkdir()  # Ray's test cluster writes its address there and does not create the folder
        self._log = (self._folder / "nodes.log").open("w")
        tool = self._folder / "hccn_tool"  # each card of these hosts has an address
        tool.write_text('#!/bin/sh\necho "ipaddr:192.0.2.1$2"\necho netmask:255.255.255.0\n')
        tool.chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(self._folder)], text=True,
            env={**os.environ, **LOOPBACK, "HCCN_TOOL_PATH": str(tool), "RAY_TMPDIR": str(self._folder)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        try:
            self.address = self._line()
        except AssertionError:
            self.close()
            raise

    def add(self, **arguments: Any) -> str:
        """Add a node; return its id."""
        return self._call(f"add {json.dumps(arguments)}")

    def kill(self, node_id: str) -> None:
        """Fail a node as a power cut would: its raylet and everything below it are killed."""
        assert self._call(f"kill {node_id}") == "ok"

    def close(self) -> None:
        """End all nodes."""
        self._process.communicate(timeout=300)
        self._log.close()
        shutil.rmtree(self._folder)

    def _call(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("> "):
                return line.removeprefix("> ").strip()
        log = self._folder / "nodes.log"
        raise AssertionError(f"the Ray nodes ended with {self._process.wait(300)}: {log.read_text()[-2000:]}")


def _main(folder: str) -> None:
    from ray.cluster_utils import Cluster

    common = {"node_ip_address": "127.0.0.1", "temp_dir": folder}
    head = {**common, "num_cpus": 0, "include_dashboard": False, "_system_config": _QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    print(f"> {cluster.address}", flush=True)
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        verb, _, rest = line.strip().partition(" ")
        if verb == "add":
            node = cluster.add_node(**{"num_cpus": 0, **common, **json.loads(rest)})
            nodes[node.node_id] = node
            print(f"> {node.node_id}", flush=True)
        else:
            cluster.remove_node(nodes.pop(rest), allow_graceful=False)
            print("> ok", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _main(sys.argv[1])
