"""scripts/first-contact: its steps and their limits, what its report shows, and that it leaves no process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks import first_contact, gpu
from benchmarks.contact import probe, running
from benchmarks.contact.steps import SHOWS, Card, steps_of
from devices.table import KINDS
from pdserve.selftest import command
from tests.devices.fake_device import FakeKind

PROGRAM = Path(__file__).with_name("contact_program.py")
SECRET = "hf_6jUDvXo0pZkqgkQ"
COUNT = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
HANG = (  # and a grandchild in a session of its own that ignores SIGTERM
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import signal, time; "
    "signal.signal(15, signal.SIG_IGN); time.sleep(600)', 'grandchild', sys.argv[1]], start_new_session=True); "
    "print('hanging', flush=True); time.sleep(600)"
)
IGNORE = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
WAIT = (
    "import pathlib, sys, time; ready, goes_on = map(pathlib.Path, sys.argv[1:]); ready.touch()\n"
    "while not goes_on.exists(): time.sleep(0.05)"
)
DEADLINE_S = 300.0


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def start(steps: object, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", str(PROGRAM), json.dumps(steps), "cuda", *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "HF_TOKEN": SECRET},
    )  # fmt: skip


def finish(steps: object, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run it; return the exit status and the report."""
    process = start(steps, folder, *arguments)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert errors == ""
    (report,) = folder.glob("first-contact-*/report.md")
    return process.returncode, report.read_text()


def left_behind(mark: Path) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if str(mark) in (one.info["cmdline"] or [])]


def cells(report: str) -> dict[str, Sequence[str]]:
    rows = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[1:]}


def test_a_step_that_hangs_or_fails_stops_no_other_step(tmp_path: Path) -> None:
    ran, mark = tmp_path / "ran", tmp_path / "mark"
    steps = [
        ["first", [python(f"print({SECRET!r})"), python(COUNT, ran)], 60], ["hangs", [python(HANG, mark)], 1],
        ["fails", [python(f"print('why', {SECRET!r}); raise SystemExit(3)"), python(COUNT, ran)], 60],
        ["absent", [[str(tmp_path / "python")]], 60], ["after", [python("")], 60, {"needs": "fails"}],
        ["not here", [], 60, {"not_here": "one device"}], ["last", [python(COUNT, ran)], 60],
    ]  # fmt: skip

    status, report = finish(steps, tmp_path)

    results = {name: row[0] for name, row in cells(report).items()}
    assert status == 1
    assert results == {
        "first": "ok", "hangs": "timed out after 1 s", "fails": "exit status 3",
        "absent": f"not started: No such file or directory: {tmp_path}/python",
        "after": "not measured: fails did not end well", "not here": "not measured: one device", "last": "ok",
    }  # fmt: skip
    assert cells(report)["first"][2:] == ["3 GB/s", "50%"]
    assert ran.read_text() == "xx"
    assert left_behind(mark) == []
    assert re.search("^a card of a test; commit [^ ]+$", report, re.MULTILINE)
    assert "[software]\npdserve: " in report
    assert "## The end of logs/fails.log\n\n```text\n" in report
    assert "\nwhy (hidden)\n```\n" in report
    assert "## The end of logs/first.log" not in report
    log = next(tmp_path.glob("first-contact-*/logs/first.log")).read_text()
    assert "(hidden)\n" in log
    assert SECRET not in log + report


def test_resume_runs_what_is_not_done_and_only_runs_one_step(tmp_path: Path) -> None:
    ran = {name: tmp_path / name for name in ("good", "bad", "late")}
    steps = [
        ["good", [python(COUNT, ran["good"])], 60],
        ["bad", [python(COUNT, ran["bad"]), python("raise SystemExit(1)")], 60],
        ["late", [python(COUNT, ran["late"])], 60],
    ]  # fmt: skip
    status, report = finish(steps, tmp_path, "--only", "bad")
    assert (status, cells(report)["good"][0]) == (1, "not measured")
    (folder,) = tmp_path.glob("first-contact-*")

    counts = []
    for arguments in ([], [], ["--only", "good"]):
        finish(steps, tmp_path, "--resume", str(folder), *arguments)
        counts.append([file.read_text().count("x") if file.exists() else 0 for file in ran.values()])

    assert counts == [[1, 2, 1], [1, 3, 1], [2, 3, 1]]
    assert sorted(log.name for log in (folder / "logs").iterdir()) == [
        "bad.1.log", "bad.2.log", "bad.log", "good.1.log", "good.log", "late.log",
    ]  # fmt: skip


def test_resume_runs_what_has_become_possible(tmp_path: Path) -> None:
    step = ["two-cards", [python("")], 60]
    assert finish([[*step, {"not_here": "one device"}]], tmp_path)[0] == 0
    (folder,) = tmp_path.glob("first-contact-*")

    _, report = finish([step], tmp_path, "--resume", str(folder))

    assert cells(report)["two-cards"][0] == "ok"


def test_a_lost_terminal_ends_no_run(tmp_path: Path) -> None:
    ready, goes_on = tmp_path / "ready", tmp_path / "goes-on"
    process = start([["first", [python(WAIT, ready, goes_on)], 60], ["second", [python("")], 60]], tmp_path)
    deadline = time.monotonic() + DEADLINE_S
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)

    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
    process.send_signal(signal.SIGHUP)
    goes_on.touch()

    assert process.wait(DEADLINE_S) == 0
    (report,) = tmp_path.glob("first-contact-*/report.md")
    assert {name: row[0] for name, row in cells(report.read_text()).items()} == {"first": "ok", "second": "ok"}


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_process_that_cannot_be_killed_holds_up_no_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that waits in a driver ends only when the driver lets it."""
    monkeypatch.setattr(running, "end_descendants", lambda timeout_s: False)
    monkeypatch.setattr(running, "_UNWIND_S", 0.0)
    mark = tmp_path / "mark"
    try:
        result = running.run_limited(python(IGNORE, mark), tmp_path / "log", limit_s=1.0, secrets=(), environ={})
    finally:
        for one in left_behind(mark):
            one.kill()

    assert result == "timed out, and one of its processes did not end after kill -9"


def test_ctrl_c_leaves_no_process_and_a_readable_report(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    process = start([["done", [python("print(1)")], 60], ["hangs", [python(HANG, mark)], 600]], tmp_path)
    deadline = time.monotonic() + DEADLINE_S
    while not left_behind(mark) or "hanging" not in _log(tmp_path, "hangs"):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE_S)

    (report,) = tmp_path.glob("first-contact-*/report.md")
    results = {name: row[0] for name, row in cells(report.read_text()).items()}
    assert (process.returncode, errors) == (130, "")
    assert results == {"done": "ok", "hangs": "interrupted"}
    assert left_behind(mark) == []


def _log(folder: Path, step: str) -> str:
    found = list(folder.glob(f"first-contact-*/logs/{step}.log"))
    return found[0].read_text() if found else ""


def test_without_a_card_it_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(KINDS, "fake", FakeKind(why="no fake driver", shown=False))
    probe.main("fake")
    found = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(first_contact, "find_card", lambda kind: found["lacking"])

    assert first_contact.main(["fake"]) == 2

    line = "first-contact: no fake card can be used here: no device node of this kind is in /dev; no fake driver\n"
    assert capsys.readouterr().err == line
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_works_is_counted_and_described(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(KINDS, "fake", FakeKind())

    probe.main("fake")

    assert json.loads(capsys.readouterr().out) == {"count": 1, "described": "fake:0: tensors of the CPU"}


def test_every_step_is_a_command_that_exists_within_eight_minutes(tmp_path: Path) -> None:
    steps = {step.name: step for step in steps_of(Card("cuda", 4, "four cards"), tmp_path)}

    assert list(steps) == list(SHOWS)
    assert list(steps)[:3] == ["selftest", "lost-peer", "device-tests"], "errors are shown before timings"
    assert all(step.limit_s <= 480 for step in steps.values())
    assert [step.name for step in steps.values() if step.not_here] == []
    for one in (line for step in steps.values() for line in step.commands):
        assert all(Path(word).exists() for word in one if word.endswith(".py")), one
        if one[2].endswith("gpu.py"):
            assert gpu.parse(one[3:]).device == "cuda"
        if "selftest" in one:
            assert command.parse(one[5:]).device == "cuda"
    assert steps["vllm-install"].commands[0][-1].startswith(str(tmp_path))  # not the product's environment
    assert steps["vllm"].environ == {"PEERS_HOME": str(tmp_path / "peers")}


def test_the_help_and_the_page_name_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        first_contact.parse(["--help"])
    helped = capsys.readouterr().out
    page = (PROGRAM.parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
    rows = page.partition("| step | what it runs |")[2].partition("\n\n")[0]

    assert re.findall(r"^\| `([a-z0-9-]+)` \|", rows, re.MULTILINE) == list(SHOWS)
    for name, shows in SHOWS.items():
        assert f"  {name:<14}{shows}\n" in helped


@pytest.mark.parametrize(
    ("card", "missing"),
    [
        (Card("cuda", 1, "one card"), {"pd-two-cards", "pd-tp-2", "tp-2"}),
        (Card("npu", 2, "two"), {"pd-tp-2", "vllm-install", "vllm"}),
    ],
)  # fmt: skip
def test_steps_that_a_machine_cannot_run_name_the_reason(card: Card, missing: set[str], tmp_path: Path) -> None:
    assert {step.name for step in steps_of(card, tmp_path) if step.not_here} == missing


@pytest.mark.parametrize(("chosen", "shown"), [(None, ["0,1", "0,1,2,3", "0,1"]), ("4,5,6,7", [None] * 3)])
def test_the_users_choice_of_cards_is_kept(
    chosen: str | None, shown: list[str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)

    steps = {step.name: step.environ for step in steps_of(Card("cuda", 4, "four cards"), tmp_path)}

    assert [steps[name].get("CUDA_VISIBLE_DEVICES") for name in ("pd-two-cards", "pd-tp-2", "tp-2")] == shown


def test_two_instances_do_not_share_an_npu(tmp_path: Path) -> None:
    for kind, parts in (("cuda", ["limits", "hand-off", "pd"]), ("npu", ["limits", "hand-off"])):
        (step,) = (one for one in steps_of(Card(kind, 1, "one"), tmp_path) if one.name == "pd-one-card")

        assert gpu.parse(step.commands[0][3:]).parts == parts


@pytest.mark.long
@pytest.mark.cluster
def test_a_tiny_run_on_the_cpu_measures_with_the_real_commands(tmp_path: Path) -> None:
    base = [sys.executable, "-P", str(PROGRAM.parents[2] / "benchmarks" / "first_contact.py"), "cpu", "--tiny"]
    for step in ("engine-1b", "lost-peer"):
        folder = next(tmp_path.glob("first-contact-*"), None)
        resume = [] if folder is None else ["--resume", str(folder)]
        done = subprocess.run(
            [*base, "--only", step, *resume], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stderr) == (0, "")

    (report,) = tmp_path.glob("first-contact-*/report.md")
    table = cells(report.read_text())
    assert [table[name][0] for name in ("engine-1b", "lost-peer", "selftest")] == ["ok", "ok", "not measured"]
    assert "| tiny decode, batch 1, context 24, pdserve: " in report.read_text()
    assert "lost peer: tcp, cpu to cpu: ok: noticed after " in report.read_text()
