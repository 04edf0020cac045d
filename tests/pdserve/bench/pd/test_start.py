"""A contestant that does not start is named with its log, and leaves nothing behind."""

import sys
from pathlib import Path

import psutil
import pytest

from pdserve.bench.pd.contestants import ServerContestant, our_colocated, vllm
from pdserve.bench.pd.start import started
from pdserve.process_plan import ProcessPlan
from wire.errors import DeadlineExceeded, Unavailable


def contestant(*scripts: str) -> ServerContestant:
    plans = tuple(
        ProcessPlan(f"one-{i}", "one", "127.0.0.1:1", (sys.executable, "-c", script), {})
        for i, script in enumerate(scripts)
    )
    return ServerContestant("X", plans, ("http://127.0.0.1:1",))


def test_a_process_that_ends_is_named_with_its_last_line_and_log(tmp_path: Path) -> None:
    sleeps = "import time; time.sleep(600)"
    messages: list[str] = []

    with (
        pytest.raises(Unavailable, match=r"one-1 ended with exit status 3: no memory \(log: .*one-1.log\)"),
        started(contestant(sleeps, "print('no memory'); exit(3)"), tmp_path, 60.0, messages.append),
    ):
        pass

    assert messages == ["X: starting one-0, one-1"]
    assert not [child for child in psutil.Process().children() if sleeps in child.cmdline()]


def test_a_process_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    sleeps = "import time; time.sleep(601)"

    with (
        pytest.raises(DeadlineExceeded, match=r"X is not ready after 0.1 s: it does not answer \(logs: .*one-0.log\)"),
        started(contestant(sleeps), tmp_path, 0.1, lambda line: None),
    ):
        pass

    assert not [child for child in psutil.Process().children() if sleeps in child.cmdline()]


def test_colocated_instances_have_half_the_cores_each_and_one_url() -> None:
    found = our_colocated(("--model", "m"), [0, 1, 2, 3])

    first, second, scheduler = found.plans
    assert [plan.command[4] for plan in (first, second)] == ["0,1", "2,3"]
    assert scheduler.command[4] == f"{first.address},{second.address}"
    assert found.urls == (f"http://{scheduler.address}",)
    assert all(plan.command[-2:] == ("--model", "m") for plan in found.plans)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_colocated_instances_have_a_card_each_where_two_are_visible(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor i in 0 1 2; do echo "$i, GPU-$i, NVIDIA H200, 570.1, 1, 143771"; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("pdserve.bench.pd.contestants.find_kind", lambda: "cuda")

    found = our_colocated(("--model", "m"), [0, 1], device)

    cards = [plan.env.get("CUDA_VISIBLE_DEVICES") for plan in found.plans]
    assert cards == ["GPU-0", "GPU-1", None]


@pytest.mark.parametrize(("binary", "start"), [("/x/python3", ["-m", "vllm.entrypoints.cli.main"]), ("/x/vllm", [])])
def test_vllms_servers_run_on_halves_and_are_joined_as_a_pair(binary: str, start: list[str]) -> None:
    pair = vllm(binary, Path("m"), "bfloat16", 2048, [0, 1], pair=True)
    replicas = vllm(binary, Path("m"), "bfloat16", 2048, [0, 1], pair=False)

    assert [plan.env["VLLM_CPU_OMP_THREADS_BIND"] for plan in pair.plans] == ["0", "1"]
    assert len({plan.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for plan in pair.plans}) == 2
    assert list(pair.plans[0].command[5:])[: len(start) + 3] == [binary, *start, "serve", "m"]
    assert [pair.hands_off, replicas.hands_off] == [True, False]
    assert ["--kv-transfer-config" in one.plans[0].command for one in (pair, replicas)] == [True, False]
