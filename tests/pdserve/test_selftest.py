"""`pdserve selftest`: a real run on the CPU, a device with one broken op, and the report about it."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from devices.table import KINDS
from engine.attention import backends
from engine.attention.interface import AttentionBackend, AttentionOptions, StepAttention
from engine.attention.reference import ReferenceAttention
from engine.device_modules import REPLACERS, STAYED
from engine.sampling.sampler import TorchChooser
from engine.step_metadata import StepMetadata
from pdserve.cli import main
from pdserve.selftest import command
from pdserve.selftest.check import CheckStatus, NotHere, SelftestCheck, Wrong, run_all
from pdserve.selftest.linears import linear_checks
from tests.devices.fake_device import TRAITS, FakeDevice, FakeKind
from tests.pdserve.fake_far_end import HELLO, take_fake_far_ends
from wire.errors import ConfigError

SECRET = "hf_6jUDvXo0pZkqgkQ"


class WindowIgnored:
    """A step of the reference that ignores the sliding window. Implements StepAttention."""

    def __init__(self, metadata: StepMetadata) -> None:
        self._step: StepAttention = ReferenceAttention().plan(metadata)

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        self._step.write(keys, values, new_keys, new_values)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        without = AttentionOptions(options.scaling, None, options.softcap, options.sinks)
        return self._step.attend(query, keys, values, without)


class Failing(WindowIgnored):
    """A step that raises an error of the device."""

    def attend(self, *given: object) -> torch.Tensor:
        raise RuntimeError("EZ9999: inner error\nsecond line")


@dataclass
class Backend:
    """Implements AttentionBackend."""

    plan: Callable[[StepMetadata], StepAttention]


@pytest.fixture(autouse=True)
def one_quiet_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices are small: several threads would only wait for each other, whatever the machine has."""
    monkeypatch.setattr("pdserve.selftest.command.logs.configure", lambda _: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})


def run(report: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit status, the document of the report, and its whole text."""
    status = main(["selftest", "--report", str(report), *flags])
    text = report.read_text(encoding="utf-8")
    return status, json.loads(text.partition("```json\n")[2].partition("\n```")[0]), text


def on_fake(
    monkeypatch: pytest.MonkeyPatch, report: Path, backend: AttentionBackend | None, *flags: str
) -> tuple[int, dict[str, Any], str]:
    monkeypatch.setitem(KINDS, "fake", FakeKind())
    take_fake_far_ends(monkeypatch)
    if backend is not None:
        monkeypatch.setitem(backends.MAKERS, "fake", lambda device, threads: backend)
    return run(report, "--device", "fake", *flags)


def verdicts(document: dict[str, Any]) -> dict[str, str]:
    return {f"{one['group']}: {one['name']}": one["verdict"] for one in document["results"]}


@pytest.mark.long
def test_the_cpu_passes_all_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("https_proxy", f"http://user:{SECRET}@proxy:3128")
    monkeypatch.setenv("NCCL_DEBUG", f"INFO {SECRET}")

    status, document, text = run(tmp_path / "report.md", "--device", "cpu")
    output = capsys.readouterr().out

    found = verdicts(document)
    assert (status, document["failed"]) == (0, [])
    assert found["attention: softcap"] == "ok"
    assert found["sampler: seeded draws"] == "ok"
    assert found["links: shm, cpu to cpu"] == "ok"
    assert found["links: tcp, cpu to cpu"] == "ok"
    assert found["links: process_group, cpu to cpu"] == "ok"
    assert found["links: cuda_ipc, cpu to cpu"] == "not here"
    assert [found[f"lost peer: {name}, cpu to cpu"] for name in ("shm", "tcp", "process_group")] == ["ok"] * 3
    assert "noticed after 0." in text
    assert found["model: combined = transformers"] == "ok"
    assert found["model: P/D = transformers"] == "ok"
    assert all(name in output for name in found)
    assert output.startswith("device cpu, as requested\ncpu: ")
    assert f"report: {tmp_path / 'report.md'}" in output
    assert document["facts"]["packages"]["torch"].startswith("2.")
    assert "proxy:3128" in text
    assert SECRET not in text + output


@pytest.mark.parametrize(
    "only",
    [
        pytest.param(("--only", "attention", "sampler", "model: combined"), id="of some"),
        pytest.param((), id="of all", marks=pytest.mark.long),
    ],
)
def test_one_broken_op_fails_its_own_row_and_the_report_names_it(
    only: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, document, text = on_fake(monkeypatch, tmp_path / "report.md", Backend(WindowIgnored), *only)

    failed = [name for name, verdict in verdicts(document).items() if verdict == "FAILED"]
    assert (status, failed, document["failed"]) == (1, ["attention: window"], ["attention: window"])
    assert "window 20: largest difference" in text
    assert "FAILED" in capsys.readouterr().out
    assert text.startswith("# pdserve selftest on fake:0: ")
    assert verdicts(document)["model: combined = transformers"] == "ok"
    if only:
        return
    assert verdicts(document)["links: process_group, fake:0 to fake:0"] == "ok"
    assert verdicts(document)["links: tcp, fake:0 to cpu"] == "ok"
    assert verdicts(document)["links: tcp, cpu to fake:0"] == "ok"
    assert verdicts(document)["links: shm, fake:0 to fake:0"] == "not here"
    assert verdicts(document)["model: P/D = transformers"] == "ok"


@pytest.mark.long
def test_failing_attention_falls_back_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, document, _ = on_fake(monkeypatch, tmp_path / "report.md", Backend(Failing), "--only", "attention", "model")

    found = verdicts(document)
    assert status == 1
    assert {verdict for name, verdict in found.items() if name.startswith("attention")} == {"FAILED"}
    assert found["model: combined = transformers"] == "ok"
    note = next(note for note in document["tested"]["notes"] if "reference" in note)
    assert "EZ9999: inner error second line" in note
    assert note in capsys.readouterr().out


def test_a_sampler_with_another_choice_fails_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(self: TorchChooser, scores: torch.Tensor) -> tuple[list[int], list[float]]:
        values, tokens = scores.topk(2, dim=-1)
        return tokens[:, 1].tolist(), values[:, 1].tolist()

    monkeypatch.setattr(TorchChooser, "best", second)

    status, document, text = on_fake(monkeypatch, tmp_path / "report.md", None, "--only", "sampler")

    assert status == 1
    assert "sampler: greedy" in document["failed"]
    assert "24 of 24 rows differ: row 0 has " in text


@pytest.mark.parametrize(("line", "verdict"), [("by its ops: 5 norms", "ok"), (f"2 norms; {STAYED}: 1 MLP", "FAILED")])
def test_a_part_not_computed_by_its_op_fails_its_row(
    line: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REPLACERS, "fake", REPLACERS["npu"])
    monkeypatch.setattr("pdserve.selftest.parts.replace_modules", lambda network, device: (line,))

    _, document, _ = on_fake(monkeypatch, tmp_path / "report.md", None, "--only", "network", "quantised")

    assert verdicts(document) == {
        "network: norms, gated MLPs and rotations": verdict,
        "linear layers: quantised": "not here",
    }
    assert document["results"][0]["words"] == line


def test_quantised_experts_and_blocks_are_tested() -> None:
    device = FakeDevice(traits=replace(TRAITS, kept_linears=("widened", "experts-widened")))

    words = {check.name: check.run() for check in linear_checks(device)}

    assert words == {"widened": "fp8 by block", "experts-widened": "4-bit in groups, W8A8, fp8, fp8 by block"}


def test_a_gpus_modules_and_experts_are_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REPLACERS, "fake", REPLACERS["cuda"])

    _, document, _ = on_fake(monkeypatch, tmp_path / "report.md", None, "--only", "network", "experts")

    assert {one["name"]: (one["verdict"], one["words"]) for one in document["results"]} == {
        "norms, gated MLPs and rotations": ("ok", "by torch: 5 norms, 2 gated MLPs, 2 attentions, 2 layers"),
        "in groups": ("ok", "by torch: the experts of 2 layers"),
    }


def test_experts_not_computed_in_groups_fail_their_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REPLACERS, "fake", REPLACERS["cuda"])
    monkeypatch.setattr("engine.cuda.experts.DTYPES", ())

    _, document, _ = on_fake(monkeypatch, tmp_path / "report.md", None, "--only", "experts")

    assert document["failed"] == ["experts: in groups"]


def test_each_check_fails_alone_and_in_one_line() -> None:
    def wrong() -> str:
        raise Wrong("off by 3")

    def absent() -> str:
        raise NotHere("no card")

    def broken() -> str:
        raise OSError("two\nlines")

    checks = [SelftestCheck("g", str(run), run) for run in (wrong, absent, broken, lambda: "fine")]

    found = [(one.verdict, one.words) for one in run_all(checks)]

    assert found == [
        (CheckStatus.FAILED, "off by 3"), (CheckStatus.NOT_HERE, "no card"), (CheckStatus.FAILED, "OSError: two lines"),
        (CheckStatus.OK, "fine"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--device", "tpu"], "--device 'tpu' is not one of auto, cpu, cuda, npu"),
        (["--index", "-1"], "--index -1: the first device is 0"),
        (["--report", "/nowhere/at/all.md"], "/nowhere/at is not a folder"),
        (["--device", "cpu", "--only", "nothing"], "--only nothing matches no row"),
    ],
)
def test_mistakes_are_one_line(typed: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", *typed]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_device_is_an_error_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.selftest import command

    monkeypatch.setitem(KINDS, "fake", FakeKind(why="no fake card is shown"))

    with pytest.raises(ConfigError, match="--device fake: no fake card is shown"):
        command.main(["--device", "fake"])


@pytest.mark.long
def test_a_row_run_alone_gives_the_same_result(tmp_path: Path) -> None:
    """P/D needs links that carry KV here: they are tested for it even if they were not selected."""
    status, document, _ = run(tmp_path / "r.md", "--device", "cpu", "--only", "P/D")

    assert status == 0
    assert [(one["name"], one["verdict"]) for one in document["results"]] == [("P/D = transformers", "ok")]
    assert "shm" in document["results"][0]["words"]


@pytest.mark.long
def test_output_of_libraries_is_only_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    best = TorchChooser.best

    def loud(self: TorchChooser, scores: torch.Tensor) -> tuple[list[int], list[float]]:
        os.write(2, f"a kernel of {SECRET} complains\n".encode())
        return best(self, scores)

    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(TorchChooser, "best", loud)

    status, _, text = on_fake(monkeypatch, tmp_path / "r.md", None, "--only", "sampler", "links: tcp, cpu to fake:0")

    shown = capfd.readouterr()
    assert (status, shown.err) == (0, "")
    assert HELLO not in shown.out
    assert "[printed by libraries, the end of self-test.log]\na kernel of" in text
    assert f"[printed by libraries, the end of far-end-fake0.log]\n{HELLO}\n" in text
    assert SECRET not in text


def test_a_row_that_ends_the_process_is_named_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(self: object, *_: object) -> None:
        raise SystemExit(139)

    monkeypatch.setattr(TorchChooser, "best", die)

    with pytest.raises(SystemExit):
        main(["selftest", "--report", str(tmp_path / "r.md"), "--device", "cpu", "--only", "memory", "sampler"])

    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    document = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    assert document["running"].startswith("sampler: ")
    assert text.startswith("# pdserve selftest on cpu: stopped after 0 of 4 checks\n")
    assert f"This row was started but did not finish: **{document['running']}**\n(library output is in" in text
    assert list(tmp_path.iterdir()) == [tmp_path / "r.md"]


def test_ctrl_c_prints_the_reports_path_and_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: object, *_: object) -> None:
        os.write(2, b"a library was busy\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchChooser, "draw", interrupted)

    status, document, text = run(tmp_path / "r.md", "--device", "cpu", "--only", "sampler")

    assert status == 130
    output = capsys.readouterr().out.splitlines()
    assert output[-2:] == ["stopped after 1 of 3 checks: 1 ok", f"report: {tmp_path / 'r.md'}"]
    assert text.startswith("# pdserve selftest on cpu: stopped after 1 of 3 checks: 1 ok\n")
    assert (document["running"], document["num_checks"]) == ("sampler: seeded draws", 3)
    assert "a library was busy" in text


def test_ctrl_c_between_two_rows_keeps_the_last_row_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "row", interrupted)

    status, document, text = run(tmp_path / "r.md", "--device", "cpu", "--only", "sampler")

    assert status == 130
    output = capsys.readouterr().out.splitlines()
    assert output[-2:] == ["stopped after 1 of 3 checks: 1 ok", f"report: {tmp_path / 'r.md'}"]
    assert text.startswith("# pdserve selftest on cpu: stopped after 1 of 3 checks: 1 ok\n")
    assert (document["running"], "did not finish" in text) == (None, False)


def test_ctrl_c_before_the_first_row_names_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> list[SelftestCheck]:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_all_checks", interrupted)

    assert main(["selftest", "--report", str(tmp_path / "r.md"), "--device", "cpu"]) == 130
    assert "report: " not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_groups_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError) as reported:
        command.main(["--device", "cpu", "--only", "nosuch"])

    groups = str(reported.value).partition("the groups are ")[2]
    assert groups.startswith("attention, ")
    assert f"the groups are {groups} (default: all)" in shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--only", "nosuch"), "--only nosuch matches no row; the groups are attention, "),
        (("--device", "cpu", "--index", "4"), "--index is 4, but the only cpu device has index 0"),
    ],
)
def test_unknown_rows_or_devices_are_refused_with_the_known(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        command.main(flags)


def test_rows_are_created_once_even_if_none_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    checks = command._all_checks

    def counted(*given: Any) -> list[SelftestCheck]:
        made.append(len(given))
        return checks(*given)

    monkeypatch.setattr(command, "_all_checks", counted)

    with pytest.raises(ConfigError, match="--only nosuch"):
        command.main(("--device", "cpu", "--only", "nosuch"))

    assert len(made) == 1


def test_a_peer_whose_loss_is_not_noticed_fails_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.selftest.far_process.FarProcess.kill", lambda self: None)

    _, document, text = run(tmp_path / "r.md", "--device", "cpu", "--only", "lost peer: tcp")

    assert document["failed"] == ["lost peer: tcp, cpu to cpu"]
    assert "the ticket was finished although its peer was killed" in text
