"""Links over process_group between real processes: one that is stopped or killed harms its own link only."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtransfer.process_group.link_ends import MAX_PAYLOAD_BYTES, GroupOutlet
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport_interface import Timeouts
from tests.kvtransfer.groups import Node, frame_of, group_threads, hello_of, make_node, place_of
from tests.kvtransfer.rig import DEADLINE_S, until

pytestmark = pytest.mark.cluster
PAYLOAD = bytes(range(256)) * 256

_RECEIVER = """
import socket, sys
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport_interface import Timeouts
from tests.kvtransfer.groups import NEVER, frame_of, hello_of, make_node, place_of

name, port = sys.argv[1], int(sys.argv[2])
sender, receiver = make_node("p"), make_node(name)
assert receiver.transport.unusable() is None  # imports torch
stream = Stream(socket.create_connection(("127.0.0.1", port)), progress_timeout_s=20.0)
inlet = receiver.transport.inlet(stream, hello_of(sender, receiver), Timeouts(5.0, 20.0))
print("ready", flush=True)
payload = bytes(range(256)) * 256
frame = frame_of(payload)
try:
    while True:
        target = bytearray(len(payload))
        stream.send([b"." if inlet.move(frame, place_of(target), NEVER) == frame.digest else b"!"])
except LinkLost:
    inlet.close()
    stream.close()
"""


@dataclass
class Far:
    """A link to a receiver in its own process, which prints "." for every frame it got, "!" for a corrupt one."""

    process: "subprocess.Popen[str]"
    outlet: GroupOutlet
    stream: Stream
    number: int = 0

    def send(self, payload: bytes = PAYLOAD) -> None:
        """Send `payload` under a header that describes PAYLOAD."""
        self.outlet.announce(frame_of(PAYLOAD, self.number), place_of(bytearray(payload)))
        self.number += 1

    def send_until_lost(self) -> None:
        """Send until the link ends. Raises LinkLost."""
        for _ in range(2_000):
            self.send()

    def send_and_hear(self, payload: bytes = PAYLOAD, due: bytes = b".") -> None:
        self.send(payload)
        answer = bytearray(1)
        self.stream.receive_into(memoryview(answer))
        assert answer == due


@contextmanager
def _far_process(sender: Node, name: str, progress_s: float = DEADLINE_S) -> Iterator[Far]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = subprocess.Popen(
            [sys.executable, "-c", _RECEIVER, name, str(listener.getsockname()[1])], text=True,
            stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        listener.settimeout(5 * DEADLINE_S)  # it imports torch first
        stream = Stream(listener.accept()[0], progress_timeout_s=progress_s)
    outlet = None
    try:
        outlet = sender.transport.outlet(stream, hello_of(sender, make_node(name)), Timeouts(5.0, progress_s))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Far(process, outlet, stream)
    finally:
        stream.shutdown()
        if outlet is not None:
            outlet.close()
        stream.close()
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.long
def test_a_stopped_receiver_ends_only_its_own_link() -> None:
    p = make_node("p")
    with _far_process(p, "stopped", progress_s=2.0) as stopped, _far_process(p, "alive") as alive:
        stopped.send_and_hear()
        stopped.process.send_signal(signal.SIGSTOP)
        lost = ""
        stopped.send()  # the receive for it was issued before, and the kernel takes it
        stopped.send()
        while not lost:
            alive.send_and_hear()
            try:
                stopped.outlet._wait_for_room(1)
            except LinkLost as error:
                lost = str(error)
        alive.send_and_hear()

        assert "no data was transferred for 2 s" in lost
        assert alive.number > 10  # two, had they waited for the stopped one
    until(lambda: not group_threads())


@pytest.mark.long
def test_a_killed_receivers_link_can_be_made_again() -> None:
    p = make_node("p")
    with _far_process(p, "killed") as killed:
        killed.send_and_hear()
        killed.process.kill()
        with pytest.raises(LinkLost):
            killed.send_until_lost()
    with _far_process(p, "killed") as restarted:
        restarted.send_and_hear()

    until(lambda: not group_threads())


@pytest.mark.long
@pytest.mark.parametrize("longer", [len(PAYLOAD) + 1, MAX_PAYLOAD_BYTES])
def test_a_payload_longer_than_its_header_is_a_corrupt_frame(longer: int) -> None:
    with _far_process(make_node("p"), "lied-to") as far:
        far.send_and_hear(bytes(longer), due=b"!")
        far.send_and_hear()

        assert far.process.poll() is None


@pytest.mark.long
def test_a_proof_longer_than_the_nonce_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.process_group.group_setup._PROOF_BYTES", 4_096)  # on this side only
    with _far_process(make_node("p"), "lied-to") as far:
        far.send_and_hear()
