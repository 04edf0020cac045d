"""A stand-in for Ray's side of the driver: actors that answer what a test lets them answer."""

import json
from collections.abc import Callable

from pdserve.ray_cluster.messages import Placement, PollReply, PollRequest, decode, encode
from pdserve.ray_cluster.need import Need

Answer = str | Exception | None


class ScriptedHandle:
    """One actor. `answers` maps a verb to its answer, None while there is none; `calls` holds the calls it received."""

    def __init__(self, **answers: Answer) -> None:
        self.answers: dict[str, Answer] = {"start": "", "stop": "stopped", **answers}
        self.calls: list[tuple[str, str]] = []
        self.killed = False
        self.log, self.exit_status = "", None  # type: tuple[str, int | None]

    def call(self, verb: str, text: str) -> "ScriptedPending":
        """Record the call."""
        self.calls.append((verb, text))
        return ScriptedPending(self, verb, text)

    def kill(self) -> None:
        """Record the call."""
        self.killed = True

    @property
    def verbs(self) -> list[str]:
        """The calls it received, without their texts."""
        return [verb for verb, _ in self.calls]

    def received_tables(self) -> list[str | None]:
        """The tables that came with the calls."""
        return [decode(PollRequest, text).global_table for verb, text in self.calls if verb == "poll"]


class ScriptedPending:
    """The answer to one call, as the script has it at the time of the poll."""

    def __init__(self, handle: ScriptedHandle, verb: str, text: str) -> None:
        self._handle, self._verb, self._text = handle, verb, text

    def poll(self) -> str | None:
        """Return or raise what the script has; `poll` is composed of the handle's log and exit status."""
        answer = self._handle.answers.get(self._verb)
        if isinstance(answer, Exception):
            raise answer
        if self._verb != "poll" or answer is not None:
            return answer
        rest = self._handle.log[decode(PollRequest, self._text).offset :]
        return encode(PollReply(7, rest, len(self._handle.log), False, self._handle.exit_status))


class ScriptedSession:
    """A Ray cluster whose nodes are named by a test."""

    node_ip = "10.0.0.9"

    def __init__(self, placements: Callable[[int, int], Answer]) -> None:
        self._entries = placements
        self.handles: dict[int, list[ScriptedHandle]] = {}
        self.reserved: tuple[Need, int, str] | None = None
        self.joined: tuple[str | None, int] | None = None
        self.closed = False

    def join(self, address: str | None, num_cpus: int) -> "ScriptedSession":
        """Stand in for the session's constructor."""
        self.joined = address, num_cpus
        return self

    def reserve(
        self, need: Need, num_instances: int, strategy: str, timeout_s: float, say: Callable[[str], None]
    ) -> None:
        """Record the call."""
        self.reserved = need, num_instances, strategy

    def place(self, index: int) -> ScriptedHandle:
        """Make an actor; its placement is the script's for its bundle and its number within that bundle."""
        before = self.handles.setdefault(index, [])
        before.append(ScriptedHandle(place=self._entries(index, len(before))))
        return before[-1]

    def close(self) -> bool:
        """Record the call."""
        self.closed = True
        return True


def placement(node: str, ip: str, port: int, *device_ids: str) -> str:
    """Return the answer of a node that accepts the instance."""
    return encode(Placement(node, ip, port, device_ids, (ip,) * len(device_ids)))


def lines(*texts: str) -> str:
    """Return a log."""
    return "".join(f"{text}\n" for text in texts)


def as_json(text: str) -> dict[str, object]:
    """Return a message after a round trip through JSON."""
    reported = json.loads(text)
    assert isinstance(reported, dict)
    return reported
