"""`pdserve links` and `pdserve role` over a scheduler's admin socket with fake instances, and where it may not be."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve import admin_client, cli
from pdserve.ports import free_ports
from scheduler.links.admin_socket import serve_admin_socket, socket_name
from simulation.instance import SimulatedInstance
from tests.pdserve.scheduler_page import PAGE, served_page
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.virtual_time import until
from wire.load import LinkStatus

WAIT_S = 300.0


class _Fallen(SimulatedInstance):
    """Its links fell back."""

    def _measure_link(self, peer_id: str) -> tuple[LinkStatus | None, str]:
        if peer_id == "decode-2":
            return LinkStatus(peer_id, "", "lost", 0, 0, 4), "decode-2 took no link"
        over = ("shm: \x1b[31mmapping failed",)
        return LinkStatus(peer_id, "tcp", "up", 3, 9, 2, 1, 0.00125, 117.25e6, over), ""


class AdminSocket:
    """A scheduler's admin socket in its own thread. Owner of the loop and its cluster."""

    def __init__(self, roles: str, kind: type[SimulatedInstance] = SimulatedInstance) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.cluster: FakeCluster
        self._roles, self._kind = roles, kind
        self._open, self._loop = threading.Event(), asyncio.new_event_loop()
        self._main: asyncio.Task[None]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._open.wait(WAIT_S)

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the socket's loop."""

        async def run() -> None:
            action()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)

    def close(self) -> None:
        """Close the socket and end the thread."""
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._own_loop) as runner, contextlib.suppress(asyncio.CancelledError):
            runner.run(self._serve())

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._main = task
        self.cluster = FakeCluster(self._roles)
        self.cluster.kind = self._kind
        async with self.cluster.serving():
            name = socket_name("127.0.0.1", self.port)
            keeping = asyncio.create_task(serve_admin_socket(name, self.cluster.control.registry))
            await until(lambda: f"@{name}\n" in Path("/proc/net/unix").read_text())
            self._open.set()
            try:
                await keeping
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)


def _words(row: str, first: int = 4) -> str:
    """Return a row's words from this one on, without the columns' padding."""
    return " ".join(row.split()[first:])


@pytest.fixture
def admin_socket(request: pytest.FixtureRequest) -> Iterator[AdminSocket]:
    made = AdminSocket(*getattr(request, "param", ("PDD",)))
    yield made
    made.close()


def test_every_pair_is_one_line_of_figures(admin_socket: AdminSocket, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["links", "--url", admin_socket.url, "--mib", "1"]) == 0

    out, err = capsys.readouterr()
    first, header, *rows = out.splitlines()
    assert first == f"{admin_socket.url}  1 MiB over each link"
    assert header.split()[:4] == ["PREFILL", "DECODE", "TRANSPORT", "STATE"]
    assert [_words(row, 0) for row in rows] == [
        f"prefill-0 10.0.0.1:8000 {decode} fake up 100 us 1.00 GB/s on 0 0 -"
        for decode in ("decode-0 10.0.0.1:8001", "decode-1 10.0.0.1:8002")
    ]
    assert err.splitlines() == [
        "measuring 1 of 2 with 1 MiB: prefill-0 to decode-0",
        "measuring 2 of 2 with 1 MiB: prefill-0 to decode-1",
    ]


def test_on_a_terminal_the_progress_is_one_line_that_disappears(
    admin_socket: AdminSocket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    assert cli.main(["links", "--url", admin_socket.url, "--mib", "1"]) == 0

    err = capsys.readouterr().err
    assert "\rmeasuring 2 of 2 with 1 MiB: prefill-0 to decode-1" in err
    assert "\n" not in err
    assert err.split("\r")[-2].strip() == ""


@pytest.mark.parametrize("admin_socket", [("PDD", _Fallen)], indirect=True)
def test_fallbacks_and_failures_are_shown_with_reasons(
    admin_socket: AdminSocket, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["links", "--url", admin_socket.url]) == 1

    fallen, failed = capsys.readouterr().out.splitlines()[2:]
    assert _words(fallen) == "tcp up 1.25 ms 117.2 MB/s on 2 1 shm: ?[31mmapping failed"
    assert _words(failed) == "- lost - - on 4 0 not measured: decode-2 took no link"


def test_as_json_it_is_one_object(admin_socket: AdminSocket, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["links", "--url", admin_socket.url, "--mib", "2", "--json"]) == 0

    reported = json.loads(capsys.readouterr().out)
    assert (reported["url"], reported["mib"], reported["note"]) == (admin_socket.url, 2, "")
    assert [(link["prefill"], link["decode"], link["bytes_per_s"]) for link in reported["links"]] == [
        ("prefill-0", "decode-0", 1e9), ("prefill-0", "decode-1", 1e9),
    ]  # fmt: skip


@pytest.mark.parametrize("admin_socket", [("C",)], indirect=True)
def test_a_combined_instance_has_no_link(admin_socket: AdminSocket, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["links", "--url", admin_socket.url]) == 0
    assert "no pair of a prefill and a decode instance" in capsys.readouterr().out


def test_zero_mib_sends_nothing(admin_socket: AdminSocket, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["links", "--url", admin_socket.url, "--mib", "0"]) == 0

    out, err = capsys.readouterr()
    assert out.splitlines()[0].endswith("as last measured")
    assert err == ""


def test_ctrl_c_is_quiet_and_ends_the_measurement(
    admin_socket: AdminSocket, capsys: pytest.CaptureFixture[str]
) -> None:
    def set_unresponsive(is_deaf: bool) -> None:
        admin_socket.cluster.instances[0].behaviour.ignores_commands = is_deaf

    admin_socket.call(lambda: set_unresponsive(True))
    command = [sys.executable, "-P", "-m", "pdserve", "links", "--url", admin_socket.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    admin_socket.call(lambda: set_unresponsive(False))

    assert first.startswith("measuring 1 of 2")
    assert (process.returncode, out, err) == (130, "", "")
    while cli.main(["links", "--url", admin_socket.url]) != 0:
        assert "one measurement at a time" in capsys.readouterr().err


def test_from_another_host_the_last_figures_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with served_page(PAGE) as url:
        assert cli.main(["links", "--url", url]) == 1

        out, err = capsys.readouterr()
        found, lost = out.splitlines()[2:]
        assert _words(found) == 'tcp up 250 us 117.0 MB/s on 2 1 shm: the peer said "no?[31m"'
        assert lost.split()[4:8] == ["shm", "down", "-", "-"]
        assert "run this on the scheduler's host" in err
        assert cli.main(["links", "--url", url, "--mib", "0"]) == 1  # one instance is lost
        assert capsys.readouterr().err == ""


def test_from_another_host_a_pair_without_transport_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.replace('state="lost"', 'state="living"')
    page += 'pdserve_link_impossible{instance="P",peer="E",reason="prefill has shm, decode has tcp"} 1\n'
    with served_page(page) as url:
        assert cli.main(["links", "--url", url, "--mib", "0"]) == 1

    row = capsys.readouterr().out.splitlines()[3]
    assert "not measured: prefill has shm, decode has tcp" in row
    assert row.split()[4:6] == ["-", "-"]


def test_another_users_scheduler_is_not_trusted(
    admin_socket: AdminSocket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(admin_client, "is_same_user", lambda sock: False)

    assert cli.main(["links", "--url", admin_socket.url]) == 1
    assert f"nothing answers at {admin_socket.url}" in capsys.readouterr().err


def test_a_wildcard_admin_socket_is_found_by_local_addresses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def socket_name(host: str, port: int) -> str:
        tried.append(host)
        return f"none-{os.getpid()}-{port}"

    monkeypatch.setattr(admin_client, "socket_name", socket_name)
    for host in ("127.0.0.1", "192.0.2.1"):
        tried.append(host)
        with pytest.raises(admin_client.NoAdminSocket):
            admin_client.connect_admin(f"http://{host}:9000")

    assert tried == ["127.0.0.1", "127.0.0.1", "0.0.0.0", "::", "192.0.2.1"]


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--mib", "257"], 2, "--mib 257 is not in 0..256"),
        (["--mib", "-1"], 2, "--mib -1 is not in 0..256"),
        (["--url", "http://127.0.0.1:1"], 1, "nothing answers at http://127.0.0.1:1: `pdserve up --detach`"),
    ],
)
def test_an_impossible_request_is_one_line(
    flags: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["links", *flags]) == status
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"),
    [
        (["decode-1", "prefill"], 0, "decode-1: decode -> prefill\n", ""),
        (["decode-1", "decode"], 0, "decode-1 already has the role decode\n", ""),
        (["decode-1", "combined", "--json"], 0, '{"instance": "decode-1", "before": "decode", "role": "combined"', ""),
        (
            ["prefill-0", "decode"],
            2,
            "",
            "prefill-0 as decode would leave no path: the living ones are prefill-0 (pref",
        ),
        (["decode-7", "decode"], 2, "", "no instance is called decode-7; the names are prefill-0, decode-0, decode-1"),
        (["decode-1", "both"], 2, "", "choose from"),
        (["decode-1"], 2, "", "required: ROLE"),
        (["decode-1", "decode", "--url", "http://127.0.0.1:1"], 1, "", "no scheduler on this host serves"),
    ],
)
def test_a_role_is_changed_or_the_reason_printed(
    admin_socket: AdminSocket, arguments: list[str], status: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = [] if "--url" in arguments else ["--url", admin_socket.url]
    assert cli.main(["role", *arguments, *url]) == status
    printed = capsys.readouterr()
    assert printed.out.startswith(out)
    assert bool(printed.out) == (status == 0)
    assert err in printed.err
    assert (printed.err == "") == (status == 0)
