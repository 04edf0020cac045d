"""The links of `pdserve selftest`: a child process at their far end, which ends in any case."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from devices.collectives import COLLECTIVES
from devices.cuda import TRAITS as CUDA
from devices.table import open_device
from kvtransfer.transport_table import mismatch
from pdserve.cli import main
from pdserve.selftest import far_end, far_process, link_pools, links, lost_peer
from pdserve.selftest.check import NotHere, Wrong
from pdserve.selftest.far_process import FarProcess, FarProcesses
from tests.devices.fake_device import FakeDevice
from tests.kvtransfer.rig import until

pytestmark = pytest.mark.usefixtures("quiet_logs")
ROOT = Path(__file__).parents[2]
LINKS = ("--device", "cpu", "--only", "links: shm", "links: tcp")
DIES = "import os, sys; os.write(2, b'driver: dead\\n'); sys.stdin.readline(); os.kill(os.getpid(), 9)"
STOPS = "import sys; sys.stdin.readline(); sys.exit(3)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
FAILS_AT = """import sys
for line in sys.stdin:
    print('{{"error": "OSError: no card"}}' if '{}' in line else '{{}}', flush=True)
"""
LACKS = 'import sys; [print(\'{"lacking": "no library"}\', flush=True) for line in sys.stdin]'
FAILS = 'import sys; [print(\'{"error": "OSError: no card"}\', flush=True) for line in sys.stdin]'


@pytest.fixture
def quiet_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.selftest.command.logs.configure", lambda _: None)


def children_of(pid: int) -> list[int]:
    """Return the far-end processes that `pid` started and that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, words = (folder / "stat").read_text(errors="replace"), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid and b"far_end" in words:
            found.append(int(folder.name))
    return found


def run(report: Path, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    status = main(["selftest", "--report", str(report), *flags])
    text = report.read_text(encoding="utf-8")
    results: list[dict[str, Any]] = json.loads(text.partition("```json\n")[2].partition("\n```")[0])["results"]
    return status, results


def far_end_is(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(far_process, "COMMAND", (sys.executable, "-c", f"{program}  # far_end"))


def test_the_ends_of_a_link_are_two_processes_and_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[list[int]] = []
    hand_over = links.hand_over

    def watched(name: str, *ends: Any) -> str:
        alive.append(children_of(os.getpid()))
        return hand_over(name, *ends)

    monkeypatch.setattr(links, "hand_over", watched)

    status, results = run(tmp_path / "r.md", *LINKS)

    assert (status, [one["verdict"] for one in results]) == (0, ["ok", "ok"])
    assert len(alive[0]) == 1
    assert alive == [alive[0]] * 2, "a child serves all links to its device"
    assert children_of(os.getpid()) == []


def test_the_far_ends_clock_leaves_out_time_in_which_it_could_not_run() -> None:
    code = (
        "import os, sys; from native import ticker; from pdserve.selftest import far_end;"
        "far_end.open_device = lambda name: os._exit(3 if ticker._ticker is None else 0);"
        "far_end.main(['cpu'])"
    )

    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=ROOT) as end:
        assert end.stdin is not None
        end.stdin.write(b'{"open": "tcp"}\n')
        end.stdin.flush()

        assert end.wait(300) == 0, "it has no ticker"


def test_a_lost_byte_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = link_pools.fill
    monkeypatch.setattr(link_pools, "fill", lambda pool: fill(pool) ^ 1)

    status, results = run(tmp_path / "r.md", *LINKS)

    assert (status, [one["verdict"] for one in results]) == (1, ["FAILED", "FAILED"])
    assert "tensor 0 differ from those sent" in results[0]["words"]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (DIES, "the receiver ended by SIGKILL: driver: dead"),
        (STOPS, "the receiver ended with status 3"),
        (FAILS, "in the receiver: OSError: no card"),
    ],
)
def test_a_far_end_that_fails_fails_only_its_rows(
    program: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_end_is(monkeypatch, program)

    status, results = run(tmp_path / "r.md", *LINKS, "network")

    assert status == 1
    assert [(one["verdict"], one["words"]) for one in results if one["group"] == "links"] == [("FAILED", words)] * 2
    assert children_of(os.getpid()) == []


def test_a_ticket_outlives_the_slowest_set_up_of_a_link() -> None:
    end = far_end._End(open_device("cpu"), "tcp")
    try:
        assert end.open() == {}
        lease_s = end.answer({"expect": 1})["ticket"]["lease_s"]
    finally:
        end.answer({"shut": True})

    slowest_s = max(one.make_s for one in COLLECTIVES.values())
    assert min(lease_s, links._DEADLINE_S) > slowest_s


def test_a_link_never_made_is_reported_before_its_peer_is_killed() -> None:
    class Unreachable:
        def call(self, request: dict[str, Any]) -> dict[str, Any]:
            endpoint = {"transport": "tcp", "address": "127.0.0.1:1"}
            ticket = {"ticket_id": "ab" * 16, "epoch": 2, "instance_id": "d", "num_tokens": link_pools.NUM_TOKENS}
            rest = {"first_token": 0, "lease_s": 30.0, "endpoints": [endpoint]}
            return {"ticket": {**ticket, **rest}} if "expect" in request else {"bytes": 0}

    pool = link_pools.make_pool(open_device("cpu"))
    try:
        with pytest.raises(Wrong, match=r"no KV link to d: tcp at 127\.0\.0\.1:1"):
            lost_peer._kill_halfway("tcp", pool, Unreachable())  # type: ignore[arg-type]
    finally:
        pool.close()


@pytest.mark.parametrize("fails", ["open", "shut"])
def test_a_far_end_that_fails_to_open_or_to_close_is_ended(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_end_is(monkeypatch, FAILS_AT.format(fails))
    monkeypatch.setattr(links, "hand_over", lambda *_: "handed over")
    far, cpu = FarProcesses(tmp_path), open_device("cpu")
    try:
        for _ in range(2):
            with pytest.raises(Wrong, match="in the receiver: OSError: no card"):
                links._send("tcp", cpu, cpu, far)

            assert children_of(os.getpid()) == []
    finally:
        far.close()


def test_a_transport_that_the_far_end_lacks_leaves_it_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far_end_is(monkeypatch, LACKS)
    far, cpu = FarProcesses(tmp_path), open_device("cpu")
    try:
        with pytest.raises(NotHere, match="no library"):
            links._send("tcp", cpu, cpu, far)

        assert len(children_of(os.getpid())) == 1
    finally:
        far.close()


class _Pool:
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("broken", ["far_end.KvReceiver", "link_pools.lacking"])
def test_a_far_end_that_cannot_open_releases_its_pool(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no card")

    pool = _Pool()
    monkeypatch.setattr("pdserve.selftest.link_pools.make_pool", lambda _: pool)
    monkeypatch.setattr("pdserve.selftest.link_pools.lacking", lambda *_: None)
    monkeypatch.setattr(f"pdserve.selftest.{broken}", fail)
    end = far_end._End(FakeDevice(), "tcp")

    with pytest.raises(OSError, match="no card"):
        end.open()

    assert pool.closed == 1


def test_a_silent_far_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far_end_is(monkeypatch, DEAF)
    monkeypatch.setattr(far_process, "_START_S", 0.5)
    monkeypatch.setattr(far_process, "_LEAVE_S", 0.1)

    status, results = run(tmp_path / "r.md", "--device", "cpu", "--only", "links: tcp")

    assert (status, results[0]["words"]) == (1, "the receiver sent nothing within 0.5 s")
    assert children_of(os.getpid()) == []


def test_ctrl_c_within_a_row_ends_the_far_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(links, "hand_over", interrupted)

    assert main(["selftest", "--report", str(tmp_path / "r.md"), *LINKS]) == 130
    assert children_of(os.getpid()) == []
    assert "Traceback" not in capsys.readouterr().err


def test_a_far_end_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from pdserve.selftest.far_process import FarProcess;"
        "far = FarProcess('cpu', Path(sys.argv[1])); print(far._process.pid, flush=True); time.sleep(300)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "far.log")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as tested:
        assert tested.stdout is not None
        child = int(tested.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        tested.kill()

    until(lambda: not Path(f"/proc/{child}").exists())


@pytest.mark.cluster
@pytest.mark.long  # the one above runs always, without a self-test, which imports torch in both processes
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 130)]
)
def test_any_end_of_the_self_test_ends_its_child(number: signal.Signals, status: int, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "pdserve", "selftest", "--report", str(tmp_path / "r.md"), *LINKS, "model"],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(scratch)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as tested:  # fmt: skip
        guard = threading.Timer(100, tested.kill)
        guard.start()
        try:
            assert tested.stdout is not None
            assert any(line.startswith("[1/") for line in tested.stdout)  # the first row's child continues to serve
            (child,) = children_of(tested.pid)
            os.killpg(tested.pid, number)  # as a terminal does
            _, err = tested.communicate(timeout=300)
        finally:
            guard.cancel()
            tested.kill()

    assert tested.returncode == status
    assert "Traceback" not in err
    until(lambda: not Path(f"/proc/{child}").exists())
    assert number is signal.SIGKILL or list(scratch.iterdir()) == []


def test_a_collective_with_one_rank_per_card_needs_two_cards() -> None:
    one_rank = "nccl allows only one rank per card, but both ends are on the same card"
    assert mismatch("process_group", CUDA, CUDA, on_one_card=True) == one_rank
    assert mismatch("process_group", CUDA, CUDA, on_one_card=False) is None
    assert mismatch("tcp", CUDA, CUDA, on_one_card=True) is None


def test_only_some_transports_work_within_one_process() -> None:
    card = FakeDevice(0, CUDA)

    names = ("cuda_ipc", "process_group", "mooncake", "tcp")
    assert [name for name in names if links.works_in_one_process(name, card)] == ["mooncake", "tcp"]


def test_a_far_process_can_be_closed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far_end_is(monkeypatch, STOPS)
    far = FarProcess("cpu", tmp_path / "far.log")

    far.close()
    far.close()

    assert not far.is_alive
