"""Hosts that are network namespaces: one address each, on one switch that can separate any two and reconnect them.

The namespaces have no names and touch nothing of this machine's own network: each lives as long as its holder, which
reads a pipe of ours and so ends with this process, however that ends.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.conftest import MISSING

COMMAND_TIMEOUT_S = 300.0
_CLONE_NEWNET = 0x40000000  # linux/sched.h


def obstacle() -> str:
    """Return why such hosts are impossible here, as the reason for a skip; empty if they are possible."""
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"{MISSING}: {tool} ({package})"
    made = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "switch", "type", "bridge"], capture_output=True, check=False
    )
    return "" if made.returncode == 0 else "network namespaces with a bridge are not permitted here"


class Namespace:
    """One network namespace and the process that holds it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.write(b"x")
        assert self._holder.stdout.read(1) == b"x", "unshare made no namespace"

    @property
    def pid(self) -> int:
        """The holder's process id, by which `ip link set ... netns` names the namespace."""
        return self._holder.pid

    @property
    def number(self) -> int:
        """What distinguishes it from every other one that exists now."""
        return Path(f"/proc/{self.pid}/ns/net").stat().st_ino

    @property
    def before(self) -> tuple[str, ...]:
        """What to put before a command to run it in here; the command replaces nsenter, process id included."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net")

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command in here to its end and return its output; raises if it fails."""
        done = subprocess.run(
            [*self.before, *command], capture_output=True, text=True, cwd=cwd, timeout=COMMAND_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Create this thread's new sockets in here. Its existing ones, and other threads, stay where they are."""
        with open("/proc/thread-self/ns/net") as home, open(f"/proc/{self.pid}/ns/net") as here:
            _set_namespace(here.fileno())
            try:
                yield
            finally:
                _set_namespace(home.fileno())

    def close(self) -> None:
        """End the holder; the kernel ends the namespace with the last process in it."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        self._holder.wait(COMMAND_TIMEOUT_S)


class Network:
    """Hosts by name at 10.0.0.<first>, the next, ..., on one switch. No host has a route to anywhere else."""

    def __init__(self, names: Sequence[str], first: int = 11) -> None:
        self.address_by_name = {name: f"10.0.0.{number}" for number, name in enumerate(names, start=first)}
        self.hosts: dict[str, Namespace] = {}
        self._ends = ExitStack()

    def __enter__(self) -> "Network":
        with self._ends:
            self._switch = self._namespace()
            self._switch.run("ip", "link", "add", "switch", "type", "bridge")
            self._switch.run("ip", "link", "set", "switch", "up")
            for name, address in self.address_by_name.items():
                self.hosts[name] = self._namespace()
                self._plug_in(name, address)
            self._ends = self._ends.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.close()

    @property
    def namespaces(self) -> tuple[int, ...]:
        """The numbers of all its namespaces, the switch's too."""
        return tuple(one.number for one in (self._switch, *self.hosts.values()))

    def part(self, *names: str) -> None:
        """Make the switch drop everything between any two of these, silently; others reach them as before."""
        self._isolate(names, "on")

    def join(self, *names: str) -> None:
        """Undo `part`."""
        self._isolate(names, "off")

    def unplug(self, name: str) -> None:
        """Make the switch drop everything to and from this host; its own interface stays up."""
        self._switch.run("ip", "link", "set", _port(name), "nomaster")

    def plug_in(self, name: str) -> None:
        """Undo `unplug`."""
        self._switch.run("ip", "link", "set", _port(name), "master", "switch")

    def _namespace(self) -> Namespace:
        made = Namespace()
        self._ends.callback(made.close)
        return made

    def _plug_in(self, name: str, address: str) -> None:
        host, port = self.hosts[name], _port(name)
        peer = ("peer", "name", "eth0", "netns", str(host.pid))
        self._switch.run("ip", "link", "add", port, "type", "veth", *peer)
        self._switch.run("ip", "link", "set", port, "master", "switch", "up")
        host.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            host.run("ip", "link", "set", interface, "up")

    def _isolate(self, names: Sequence[str], state: str) -> None:
        for name in names:
            self._switch.run("ip", "link", "set", _port(name), "type", "bridge_slave", "isolated", state)


def living(namespaces: Sequence[int]) -> dict[int, list[int]]:
    """Return which of these namespaces some process is still in, with the process ids."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            number = (folder / "ns" / "net").stat().st_ino
        except OSError:  # it ended in the meantime, or we may not look at it
            continue
        if number in namespaces:
            found.setdefault(number, []).append(int(folder.name))
    return found


def _port(name: str) -> str:
    """The switch's end of a host's cable; an interface's name has 15 characters at most."""
    return f"to-{name}"[:15]


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}", sys.executable)
