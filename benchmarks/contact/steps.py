"""The steps of a first contact: for each, existing commands, a time limit, and where to find their figures."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contact.report import Figure
from devices.table import find_kind
from pdserve.selftest.check import GROUPS, LOST_PEER
from ranktable_tools.devices.kinds import kind_named, may_share

LIMIT_S = 480.0
SHOWS = {
    "selftest": "every row of pdserve selftest except those of lost-peer",
    "lost-peer": "each transport, with kill -9 of the receiver in the middle of a hand-off",
    "device-tests": "the tests that machines without such a card skip, if pytest is installed",
    "engine-1b": "decode and prefill of one engine with random weights",
    "engine-8b": "the same with an 8B shape",
    "pd-one-card": "the hop between two processes on one card; on GPUs also P/D against one combined instance",
    "pd-two-cards": "P/D with a card for each, over NCCL or HCCL, and the gap between D's tokens while KV arrives",
    "pd-tp-2": "the same with two ranks each, on four cards: KV transfers beside all-reduces",
    "tp-2": "32 streams on an 8B shape, on two cards against one",
    "vllm-install": "on GPUs: vLLM's wheel in an environment of its own inside the folder",
    "vllm": "on GPUs: vLLM and this engine in turn",
}
"""What each step runs, in order: correctness before speed."""
VLLM = "0.32.0"
_ROOT = Path(__file__).resolve().parents[2]
_PROBE_S = 120.0
_TESTS = {
    "cuda": ("tests/kvtransfer/test_device_gpu.py", "tests/engine/test_quantization_kept_gpu.py"),
    "npu": ("tests/npu/test_on_npu.py",),
}
Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """The devices of one kind that can be used here."""

    kind: str
    count: int
    described: str


@dataclass(frozen=True, slots=True)
class Step:
    """Commands that run one after another until one fails.

    `not_here` is why none can run on this machine; `needs` is a step without which this one measures nothing.
    """

    name: str
    commands: tuple[Command, ...]
    figures: Callable[[], tuple[Figure, ...]] = tuple
    outputs: tuple[Path, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = LIMIT_S
    not_here: str | None = None
    needs: str | None = None


def find_card(kind: str) -> Card | str:
    """Return the devices of this kind, or why none can be used. A child process checks, since a driver may hang."""
    command = [sys.executable, "-P", str(_ROOT / "benchmarks" / "contact" / "probe.py"), kind]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=_PROBE_S)
        found = json.loads(output.splitlines()[-1])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # not waited for: it may hang in the driver
        return f"the driver's libraries did not respond within {_PROBE_S:g} s"
    except (IndexError, ValueError):
        return f"the probe exited with status {process.returncode}: {' '.join(errors.split())[-300:]}"
    return found["lacking"] if "lacking" in found else Card(kind, found["count"], found["described"])


def steps_of(card: Card, folder: Path, *, tiny: bool = False) -> list[Step]:
    """Return all steps in order, also those that this machine cannot run."""
    shares = may_share(kind_named(card.kind))  # two instances on one NPU are refused

    def on(count: int) -> dict[str, Any]:
        """Return the fields of a step on `count` devices.

        Without `environ`, gpu.py makes visible only as many devices as one side needs.
        """
        visible = find_kind(card.kind).traits.visible_variable
        is_set = visible is None or visible in os.environ
        return {
            "not_here": None if card.count >= count else f"{card.count} of {count} devices visible",
            "environ": {} if is_set else {visible: ",".join(map(str, range(count)))},
        }

    return [
        _selftest("selftest", [f"{group}: " for group in GROUPS if group != LOST_PEER], card, folder),
        _selftest("lost-peer", [f"{LOST_PEER}: "], card, folder),
        _tests(card, folder),
        _rates("engine-1b", "1b", ["limits", "layers", "steps"], card, folder, tiny),
        _rates("engine-8b", "8b", ["limits", "layers", "steps"], card, folder, tiny),
        _rates("pd-one-card", "1b", ["limits", "hand-off", *(["pd"] if shares else [])], card, folder, tiny),
        _rates("pd-two-cards", "1b", ["pd"], card, folder, tiny, "--transport", "process_group", **on(2)),
        _rates("pd-tp-2", "1b", ["pd"], card, folder, tiny, "--transport", "process_group", "--ranks", "2", **on(4)),
        _rates("tp-2", "8b", ["tp"], card, folder, tiny, **on(2)),
        *_vllm(card, folder),
    ]


def _selftest(name: str, only: list[str], card: Card, folder: Path) -> Step:
    report = folder / f"{name}.md"
    command = (*_python("-m", "pdserve", "selftest"), "--device", card.kind, "--report", str(report), "--only", *only)
    return Step(name, (command,), lambda: _checked(report), (report,))


def _rates(
    name: str, shape: str, parts: list[str], card: Card, folder: Path, tiny: bool, *more: str,
    not_here: str | None = None, environ: Mapping[str, str] | None = None,
) -> Step:  # fmt: skip
    rows = folder / f"{name}.json"
    command = (
        *_python(str(_ROOT / "benchmarks" / "gpu.py")), "--device", card.kind, "--shapes", shape, "--limits", "here",
        "--parts", *parts, "--json", str(rows), *more, *(("--tiny",) if tiny else ()),
    )  # fmt: skip
    return Step(name, (command,), lambda: _measured(rows), (rows,), environ or {}, not_here=not_here)


def _tests(card: Card, folder: Path) -> Step:
    """Run the tests that every machine without such a card skips."""
    files = [str(_ROOT / name) for name in _TESTS.get(card.kind, ())]
    why = "no test needs this kind of device" if not files else None
    if importlib.util.find_spec("pytest") is None:
        why = "pytest is not installed: scripts/install --with test"
    command = (*_python("-m", "pytest"), "-n0", "-p", "no:cacheprovider", "-rs", *files)
    return Step("device-tests", (command,), lambda: _last_line(folder / "logs" / "device-tests.log"), not_here=why)


def _vllm(card: Card, folder: Path) -> list[Step]:
    """Install vLLM into an environment of its own in the folder; then run it and our engine in turn on one model."""
    why = None if card.kind == "cuda" else "vLLM's wheel on PyPI is for GPUs"
    home, model = folder / "peers", folder / "model-1b"
    venv, log = home / "vllm", folder / "logs" / "vllm.log"
    install = (str(venv / "bin" / "python"), "-m", "pip", "install", f"vllm=={VLLM}")
    write = (*_python(str(_ROOT / "benchmarks" / "card" / "model_folder.py")), card.kind, "1b", str(model))
    bench = _python(
        "-m", "pdserve", "bench", "engine", "--device", card.kind, "--model", str(model), "--peer", "vllm"
    )  # fmt: skip
    return [
        Step("vllm-install", (_python("-m", "venv", "--clear", str(venv)), install), not_here=why),
        Step(
            "vllm", (write, bench), lambda: _compared(log), environ={"PEERS_HOME": str(home)}, not_here=why,
            needs="vllm-install",
        ),
    ]  # fmt: skip


def _last_line(log: Path) -> tuple[Figure, ...]:
    lines = log.read_text(encoding="utf-8").split("\n") if log.exists() else []
    return tuple(Figure(line.strip("= ")) for line in lines[-2:-1])


def _python(*arguments: str) -> Command:
    return (sys.executable, "-P", *arguments)


def _checked(report: Path) -> tuple[Figure, ...]:
    """Return a self-test's summary, its failed and unfinished checks, and its successful checks of links."""
    if not report.exists():
        return ()
    text = report.read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    shown = [
        f"{one['group']}: {one['name']}: {one['verdict']}: {one['words']}"
        for one in document["results"]
        if one["verdict"] == "FAILED" or (one["verdict"] == "ok" and one["group"] in ("links", LOST_PEER))
    ]
    running = [f"did not finish: {document['running']}"] if document["running"] else []
    summary = text.partition("\n")[0].removeprefix("# pdserve selftest on ")
    return tuple(map(Figure, (summary, *shown, *running)))


def _measured(rows: Path) -> tuple[Figure, ...]:
    """Return the rows of benchmarks/gpu.py."""
    if not rows.exists():
        return ()
    found = []
    for row in json.loads(rows.read_text(encoding="utf-8"))["rows"]:
        value = (row["note"] or "not measured") if row["value"] is None else f"{row['value']:,.4g} {row['unit']}"
        who = f", {row['who']}" if row["who"] else ""
        found.append(Figure(f"{row['measure']}{who}: {value}", row["fraction"], is_missing=row["value"] is None))
    return tuple(found)


def _compared(log: Path) -> tuple[Figure, ...]:
    """Return the rows that `pdserve bench engine` printed into the log."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    rows = [json.loads(line) for line in lines if line.startswith('{"measure"')]
    return tuple(
        Figure(f"{row['measure']}: {row['tokens_per_s']} tokens/s, vLLM {row['peer_tokens_per_s']}", row["fraction"])
        for row in rows
        if "peer_tokens_per_s" in row
    )
