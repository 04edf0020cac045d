"""The table of instances, from a metrics page and, if `up` started them, its run folder."""

import os
import socket
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.client import parse_metrics
from pdserve.cluster_page import read_page
from pdserve.replacement import Phase
from pdserve.run_folder import ClusterState, ProcessRecord, RunFolder, start_time
from pdserve.status import table
from tests.pdserve.scheduler_page import PAGE, served_page

AT = 1795403045.0


def _state() -> ClusterState:
    started = start_time(os.getpid()) or 0
    return ClusterState(
        "http://127.0.0.1:9000",
        "m",
        (
            ProcessRecord("prefill-0", "prefill", os.getpid(), started, "127.0.0.1:1", "/l"),
            ProcessRecord("decode-0", "decode", os.getpid(), started + 1, "127.0.0.1:2", "/l"),
        ),
    )


def test_the_table_shows_metrics_and_lost_processes() -> None:
    page = (
        'pdserve_instance_info{address="127.0.0.1:1",instance="p",role="combined",state="living"} 1\n'
        'pdserve_link_up{instance="p",peer="d",transport="shm"} 1\n'
        'pdserve_kv_blocks_used{instance="p"} 3\npdserve_kv_blocks_total{instance="p"} 64\n'
        'pdserve_running{instance="p"} 2\npdserve_waiting{instance="p"} 1\n'
    )

    lines = table(_state(), read_page(parse_metrics(page)))

    assert lines[0].split()[:4] == ["NAME", "ROLE", "ADDRESS", "PID"]
    assert [line.split()[1] for line in lines[1:]] == ["combined", "decode"], "of the page first"
    assert lines[1].split()[4:] == ["living", "0", "3/64", "2", "1", "-", "shm", "to", "d", "up"]
    assert lines[2].split()[4:7] == ["gone", "0", "-"]


def test_workers_of_another_engine_are_named_below_the_table() -> None:
    rows = [("prefill-0", "vLLM 0.32.0"), ("prefill-1", "pdserve"), ("decode-0", "vLLM 0.32.0"), ("decode-1", "")]
    page = "".join(
        f'pdserve_instance_info{{address="http://h:{at}",instance="{at}",name="{name}",role="{name[:-2]}",'
        f'state="living",kv_digests="",engine="{engine}"}} 1\n'
        for at, (name, engine) in enumerate(rows)
    )
    lines = table(None, read_page(parse_metrics(page)))
    assert lines[5:] == ["prefill-0, decode-0: vLLM 0.32.0"]
    assert lines[1].split()[-2:] == ["-", "-"]


def test_workers_that_ran_already_are_below_the_processes() -> None:
    page = (
        'pdserve_instance_info{address="127.0.0.1:1",instance="p",role="prefill",state="living"} 1\n'
        'pdserve_instance_info{address="http://h:1",instance="w",name="decode-1",role="decode",state="refused"} 1\n'
    )

    lines = table(_state(), read_page(parse_metrics(page)), {"http://h:1": "models differ"})

    assert lines[3].split()[:6] == ["decode-1", "decode", "http://h:1", "-", "refused", "-"]
    assert lines[4] == "decode-1 is refused: models differ"


def test_an_instance_restarted_by_hand_is_living() -> None:
    page = 'pdserve_instance_info{address="127.0.0.1:2",instance="d",role="decode",state="living"} 1\n'

    assert table(_state(), read_page(parse_metrics(page)))[2].split()[:5] == [
        "decode-0", "decode", "127.0.0.1:2", "-", "living",
    ]  # fmt: skip


@pytest.mark.parametrize("state", ["refused", "connecting", "lost"])
def test_a_replaced_process_has_the_schedulers_state(state: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        gone = ProcessRecord("decode-0", "decode", os.getpid(), (start_time(os.getpid()) or 0) + 1, address, "/l")
        page = f'pdserve_instance_info{{address="{address}",instance="d",role="decode",state="{state}"}} 1\n'

        lines = table(
            ClusterState("http://127.0.0.1:9000", "m", (gone,)), read_page(parse_metrics(page)),
            {address: "its block size\x1b[31m is 32"},
        )  # fmt: skip

    assert lines[1].split()[:5] == ["decode-0", "decode", address, "-", state]
    assert lines[2:] == [f"decode-0 is {state}: its block size?[31m is 32"]


def test_a_process_that_does_not_answer_is_gone() -> None:
    page = 'pdserve_instance_info{address="127.0.0.1:2",instance="d",role="decode",state="lost"} 1\n'

    lines = table(_state(), read_page(parse_metrics(page)), {"127.0.0.1:2": "no way there"})

    assert lines[2].split()[3:5] == [str(os.getpid()), "gone"]
    assert len(lines) == 3


@pytest.mark.parametrize("note", ["starting again", "given up"])
def test_the_supervisors_plan_for_a_dead_process_is_shown(note: str) -> None:
    started = (start_time(os.getpid()) or 0) + 1
    dead = ProcessRecord("decode-0", "decode", os.getpid(), started, "127.0.0.1:2", "/l", restarts=3, note=note)
    page = 'pdserve_instance_info{address="127.0.0.1:2",instance="d",role="decode",state="lost"} 1\n'

    lines = table(ClusterState("http://127.0.0.1:9000", "m", (dead,)), read_page(parse_metrics(page)))

    assert lines[1].split()[3:7] == ["-", *note.split(), "3"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("process",), "replacing p from the spare: process 1.5 s (CPU 0.5 s), now weights"),
        (("process", "weights"), "process 1.5 s (CPU 0.5 s), weights 1.5 s (CPU 0.5 s), now session"),
        (
            ("process", "weights", "session", "serving"),
            "replaced p at 2026-11-23T03:04:05Z in 6.0 s from the spare: process",
        ),
    ],
)
def test_a_running_replacement_shows_its_phase(names: tuple[str, ...], words: str) -> None:
    phases = tuple(Phase(name, 1.5, 0.5) for name in names)
    one = ProcessRecord("p", "prefill", 0, 0, "127.0.0.1:1", "", phases=phases, from_spare=True, replaced_at=AT)

    line = table(ClusterState("http://127.0.0.1:9000", "m", (one,)), ())[-1]

    assert words in line
    assert "so far" not in line


@pytest.mark.parametrize(
    ("values", "shown"),
    [((0, 0), ""), ((1, 0), "  prefill gone: requests fail"), ((0, 1), "  decode gone: the others serve alone")],
)
def test_gone_roles_table_and_supervisor_are_shown_with_the_model(
    values: tuple[int, int], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = start_time(os.getpid()) or 0
    watcher = ProcessRecord("supervisor", "supervisor", os.getpid(), started, "", "/l")
    page = PAGE + 'pdserve_table_version{digest="7ab1e0123456"} 2.0\n'
    for (role, choice), gone in zip((("prefill", "fail"), ("decode", "local")), values, strict=True):
        page += f'pdserve_role_gone{{role="{role}",when_gone="{choice}"}} {gone}.0\n'
    with served_page(page) as url:
        RunFolder(tmp_path).write(ClusterState(url, "m", (), watcher))
        assert cli.main(["status", "--run-dir", str(tmp_path)]) == 0

    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"{url}  ready  model m{shown}  table 2 (7ab1e012)  supervisor {os.getpid()}"


def test_without_a_run_folder_instances_are_named_by_role_and_index() -> None:
    lines = table(None, read_page(parse_metrics(PAGE)))

    assert [line.split()[:5] for line in lines[1:]] == [
        ["prefill-0", "prefill", "10.0.0.18:8088", "-", "living"],
        ["decode-0", "decode", "10.0.0.19:8089", "-", "living"],
        ["decode-1", "decode", "10.0.0.20:8089", "-", "lost"],
    ]


def test_a_fallback_is_shown_with_its_reason_as_printable_text() -> None:
    lines = table(None, read_page(parse_metrics(PAGE)))

    assert 'tcp to decode-0 up (fallback: shm: the peer said "no?[31m")' in lines[1]
    assert lines[1].endswith("shm to decode-1 down")


@pytest.mark.parametrize(
    "reason",
    [
        "not offered there", "another host or network namespace", "slower than tcp",
        "its link has not been measured yet", "its link is being set up",
    ],
)  # fmt: skip
def test_a_transport_that_did_not_fail_is_not_a_fallback(reason: str) -> None:
    page = PAGE.replace('the peer said \\"no\x1b[31m\\"', reason)
    never = page.replace('fallbacks_total{instance="P",peer="D"} 1.0', 'fallbacks_total{instance="P",peer="D"} 0.0')
    both = page + 'pdserve_link_passed_over{instance="P",peer="D",reason="it broke",transport="cuda_ipc"} 1.0\n'

    shown = [table(None, read_page(parse_metrics(one)))[1] for one in (never, page, both)]

    assert f"tcp to decode-0 up (not shm: {reason})" in shown[0]
    assert f"tcp to decode-0 up (not shm: {reason})" in shown[1]
    assert f"tcp to decode-0 up (fallback: cuda_ipc: it broke; not shm: {reason})" in shown[2]


def test_a_link_that_is_being_connected_is_not_shown_as_down() -> None:
    page = PAGE.replace('peer="E",transport="shm"', 'peer="E",transport=""')

    assert table(None, read_page(parse_metrics(page)))[1].endswith(", no link to decode-1 yet")


def test_digests_are_shown_for_each_instance() -> None:
    lines = table(None, read_page(parse_metrics(PAGE)))

    assert [line.split()[9] for line in lines[1:]] == ["on", "off", "-"]


def test_a_pair_without_a_common_transport_is_shown_in_full() -> None:
    page = PAGE + 'pdserve_link_impossible{instance="P",peer="E",reason="prefill has shm, decode has tcp"} 1\n'

    assert table(None, read_page(parse_metrics(page)))[1].endswith(
        "NO LINK to decode-1: prefill has shm, decode has tcp"
    )


def test_a_long_reason_is_cut() -> None:
    page = PAGE + (
        'pdserve_link_passed_over{instance="P",peer="E",reason="' + "x" * 150 + '",transport="process_group"} 1\n'
    )

    assert table(None, read_page(parse_metrics(page)))[1].endswith("xxx...)")


def test_any_cluster_is_shown_by_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_RUN_DIR", str(tmp_path))
    with served_page(PAGE) as url:
        status = cli.main(["status", "--url", url])

        first, *lines = capsys.readouterr().out.splitlines()
        assert (status, first) == (0, f"{url}  ready  model m")
        assert len(lines) == 5
        assert lines[4] == "decode-1 is lost: it was ?[31mcut"


def test_no_cluster_is_one_line_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("pdserve.target_cluster.DEFAULT_URL", "http://127.0.0.1:1")

    assert cli.main(["status"]) == 1
    assert "nothing answers at http://127.0.0.1:1: `pdserve up --detach` starts" in capsys.readouterr().err
    assert cli.main(["status", "--run-dir", str(tmp_path)]) == 1
    assert f"no cluster of `pdserve up` runs in {tmp_path}" in capsys.readouterr().err


def test_another_server_is_not_mistaken_for_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    with served_page("process_cpu_seconds_total 3\n") as url:
        assert cli.main(["status", "--url", url]) == 1

    assert "is not a pdserve scheduler" in capsys.readouterr().err


def test_a_silent_cluster_of_up_is_shown_by_its_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (first, *_) = _state().processes
    RunFolder(tmp_path).write(ClusterState("http://127.0.0.1:1", "m", (first,)))

    assert cli.main(["status", "--run-dir", str(tmp_path)]) == 1

    out = capsys.readouterr().out.splitlines()
    assert out[0] == "http://127.0.0.1:1  not ready: no answer  model m"
    assert out[2].split()[:5] == ["prefill-0", "prefill", "127.0.0.1:1", str(os.getpid()), "running"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--url", "https://h:1"], "write http://HOST:PORT"),
        (["--url", "http://h:port"], "--url 'http://h:port'"),
        (["--url", "http://h:1/other"], "write http://HOST:PORT"),
        (["--url", "http://h:1", "--run-dir", "/x"], "use only one"),
    ],
)
def test_a_wrong_address_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "condition"),
    [
        ("", "starting"),
        ('pdserve_instance_info{address="10.0.0.2:1",instance="d",role="decode",state="connecting"} 1\n', "connecting"),
        ('pdserve_instance_info{address="10.0.0.2:1",instance="d",role="decode",state="living"} 1\n', "living"),
    ],
)
def test_a_remote_instance_has_no_pid_and_is_never_gone(page: str, condition: str) -> None:
    elsewhere = ProcessRecord("decode-0", "decode", 0, 0, "10.0.0.2:1", "/l")

    line = table(ClusterState("http://127.0.0.1:9000", "m", (elsewhere,)), read_page(parse_metrics(page)))[1]

    assert line.split()[3:5] == ["-", condition]


def test_each_of_several_schedulers_has_its_own_state() -> None:
    started = start_time(os.getpid()) or 0
    schedulers = [
        ProcessRecord(f"scheduler-{i}", "scheduler", os.getpid(), started, f"127.0.0.1:{i}", "/l") for i in range(2)
    ]
    state = ClusterState("http://127.0.0.1:9000", "m", tuple(schedulers))

    lines = table(state, [], {}, {"127.0.0.1:0": "ready", "127.0.0.1:1": "silent"})

    assert [line.split()[4] for line in lines[1:]] == ["ready", "silent"]
