"""All checks together, and how their findings are shown."""

import json
import threading
from pathlib import Path

import pytest

from ranktable_tools.devices.tools import ToolOutput
from ranktable_tools.doctor.case import DoctorInput, DoctorTables
from ranktable_tools.doctor.checks import CHECKS, DoctorCheck
from ranktable_tools.doctor.examination import examine
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.doctor.screen import json_text, text_lines
from ranktable_tools.doctor.verdict import CheckResult, Verdict, combined, fail, not_here, ok, warn, worst
from ranktable_tools.errors import RanktableError
from tests.ranktable_tools.bench import Bench

FINDINGS = [
    CheckResult("ports", ok("8088 is free")),
    CheckResult("no_proxy", warn("http_proxy set", "export no_proxy=x")),
    CheckResult("cards", fail("card 3 is Alarm", "npu-smi")),
    CheckResult("docker", not_here("this is a container")),
]


def test_every_check_has_a_unique_name_and_a_scope() -> None:
    names = [check.name for check in CHECKS]

    assert len(set(names)) == len(names)
    assert all(check.run.__doc__ for check in CHECKS)


def test_a_bare_machine_has_no_failures(tmp_path: Path) -> None:
    findings = examine(Bench(tmp_path).case(), 60, CHECKS)

    assert [finding.name for finding in findings] == [check.name for check in CHECKS]
    assert {finding.verdict.result for finding in findings} <= {"ok", "not here"}


def test_findings_keep_the_tables_order_whichever_finishes_first(tmp_path: Path) -> None:
    second_is_done = threading.Event()

    def first(case: DoctorInput) -> Verdict:
        assert second_is_done.wait(300)
        return ok("first")

    def second(case: DoctorInput) -> Verdict:
        second_is_done.set()
        return ok("second")

    findings = examine(Bench(tmp_path).case(), 20, (DoctorCheck("a", first), DoctorCheck("b", second)))

    assert [finding.verdict.message for finding in findings] == ["first", "second"]


def test_a_check_that_hangs_hides_no_other(tmp_path: Path) -> None:
    gate = threading.Event()

    def hang(case: DoctorInput) -> Verdict:
        gate.wait(300)
        return ok("too late")

    try:
        findings = examine(
            Bench(tmp_path).case(), 2, (DoctorCheck("a", hang), DoctorCheck("b", lambda case: ok("well")))
        )
    finally:
        gate.set()

    assert [(one.verdict.result, one.verdict.message) for one in findings] == [
        ("fail", "not done within 2 s"), ("ok", "well"),
    ]  # fmt: skip


def test_an_exception_in_a_check_is_its_finding(tmp_path: Path) -> None:
    def refuse(case: DoctorInput) -> Verdict:
        raise RanktableError("npu-smi info: did not exit within 10 s")

    def break_down(case: DoctorInput) -> Verdict:
        raise KeyError("x")

    findings = examine(Bench(tmp_path).case(), 10, (DoctorCheck("a", refuse), DoctorCheck("b", break_down)))

    words = [finding.verdict.message for finding in findings]
    assert words == ["npu-smi info: did not exit within 10 s", "the check failed: KeyError('x')"]


def test_a_tool_runs_once_and_one_tool_at_a_time(tmp_path: Path) -> None:
    running, peak, requests = 0, 0, []

    def run(command: object) -> ToolOutput:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        requests.append(command)
        running -= 1
        return ToolOutput(("tool",), "said", 0)

    bench = Bench(tmp_path)
    bench.tool("npu-smi", {})
    machine = Machine({"PATH": str(bench.tools)}, root=bench.root, run=run)

    def check(number: int) -> DoctorCheck:
        return DoctorCheck(f"{number}", lambda case: ok(str(case.machine.run_tool("npu-smi", str(number % 3)))))

    checks = [check(number) for number in range(9)]

    examine(DoctorInput(machine, DoctorTables()), 20, checks)

    assert (len(requests), peak) == (3, 1)


def test_a_tool_that_did_not_answer_is_not_retried(tmp_path: Path) -> None:
    requests = []

    def run(command: object) -> ToolOutput:
        requests.append(command)
        raise RanktableError("did not exit within 10 s")

    bench = Bench(tmp_path)
    bench.tool("npu-smi", {})
    machine = Machine({"PATH": str(bench.tools)}, root=bench.root, run=run)

    for _ in range(2):
        with pytest.raises(RanktableError, match="did not exit within 10 s"):
            machine.run_tool("npu-smi", "info")
    assert len(requests) == 1


def test_the_screen_has_one_line_per_check_and_the_next_step_below() -> None:
    assert text_lines("doctor on a", FINDINGS) == [
        "doctor on a",
        "ok    ports     8088 is free",
        "warn  no_proxy  http_proxy set",
        "                -> export no_proxy=x",
        "FAIL  cards     card 3 is Alarm",
        "                -> npu-smi",
        "-     docker    this is a container",
        "1 to fix, 1 to check, 1 ok, 1 not here",
    ]


def test_colours_are_opt_in_and_a_tools_own_are_removed() -> None:
    shown = text_lines("t", [CheckResult("ports", ok("\x1b[31mred"))], colour=True)

    assert shown[1] == "\x1b[32mok  \x1b[0m  ports  ?[31mred"


def test_json_has_the_same_findings_and_the_worst_result() -> None:
    reported = json.loads(json_text("t", FINDINGS))

    assert reported["result"] == "fail"
    assert reported["findings"][1] == {
        "name": "no_proxy", "result": "warn", "words": "http_proxy set", "next_step": "export no_proxy=x",
    }  # fmt: skip


def test_findings_are_combined_with_the_worst_first() -> None:
    verdict = combined([warn("b", "step 2"), fail("a", "step 1"), warn("c", "step 2")], "fine")

    assert (verdict.result, verdict.message, verdict.next_step) == ("fail", "a; b; c", "step 1; step 2")
    assert combined([], "fine") == ok("fine")
    assert worst([]) == "ok"
    assert worst(["not here", "ok"]) == "ok"
