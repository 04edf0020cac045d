"""What a member's own container does: its tables, the wait for the cluster's, and the flags of its process."""

import json
import os
from pathlib import Path

import pytest

from ranktable_tools.errors import RanktableError
from ranktable_tools.kube.api import Pod
from ranktable_tools.kube.command_line import main
from ranktable_tools.kube.merging import ClusterSize, decide
from ranktable_tools.kube.names import PART_FILE, TABLE_FILE
from ranktable_tools.kube.own_devices import own_device_ids
from ranktable_tools.kube.start import Start, exec_command, generate, variables, wait_for_table
from ranktable_tools.kube.waiting import WaitLimits
from ranktable_tools.launch_plan import resolve
from tests.deploy.kube_parts import part
from tests.deploy.slept_clock import SleptClock, no_lines
from tests.ranktable_tools.documents import modelarts, server


def _table(path: Path, *, prefill: str = "192.0.2.1", decode: str = "192.0.2.2") -> None:
    path.write_text(json.dumps(modelarts(prefill=[server(prefill, 0)], decode=[server(decode, 0)])))


def _prefill(folder: Path) -> Start:
    return Start("prefill", "192.0.2.1", folder, port=8088, device_type="cpu")


def _own(folder: Path) -> Path:
    """A local table that has the entry which `_table` gives the prefill instance."""
    path = folder / "local.json"
    document = {"version": "1.0", "status": "completed", "group_id": "0", "server_count": "1"}
    path.write_text(json.dumps({**document, "server_list": [server("192.0.2.1", 0)]}))
    return path


def test_a_pod_writes_its_part_of_the_table(tmp_path: Path) -> None:
    start = Start("decode", "192.0.2.2", tmp_path, num_devices=2, port=8089, device_type="cpu")

    local = generate(start, no_lines, {}, tmp_path)

    assert (tmp_path / PART_FILE).read_text() == part("decode", "192.0.2.2", "0,1", 8089)
    assert json.loads(local.read_text())["server_list"][0]["server_ip"] == "192.0.2.2"


def test_npus_are_written_with_the_addresses_of_their_own_network(tmp_path: Path) -> None:
    _nodes(tmp_path, "davinci4", "davinci5", "davinci_manager")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "hccn.conf").write_text("address_4=10.9.0.4\naddress_5=10.9.0.5\n")
    start = Start("prefill", "10.0.0.1", tmp_path / "state", 2, 8088, device_ip_from="conf")

    local = generate(start, no_lines, {}, tmp_path)

    devices = json.loads(local.read_text())["server_list"][0]["device"]
    assert [(one["device_id"], one["device_ip"]) for one in devices] == [("4", "10.9.0.4"), ("5", "10.9.0.5")]


def test_the_scheduler_has_no_device_and_no_port(tmp_path: Path) -> None:
    generate(Start("scheduler", "pdserve.models.svc", tmp_path, port=9000), no_lines, {}, tmp_path)

    assert (tmp_path / PART_FILE).read_text() == part("scheduler", "pdserve.models.svc")


def test_the_process_starts_once_the_table_is_complete_and_has_it(tmp_path: Path) -> None:
    table, messages = tmp_path / TABLE_FILE, list[str]()

    def happens(now: float) -> None:
        if now >= 90:
            _table(table)
        elif now >= 60:
            table.write_text(json.dumps({"version": "1.0", "status": "initializing"}))

    clock = SleptClock(happens)
    found = wait_for_table(_prefill(tmp_path), _own(tmp_path), WaitLimits(100.0, messages.append, clock, clock.sleep))

    assert found == table
    assert 90 <= clock.now < 91
    assert messages[0] == f"waiting for the cluster's table: {table} is not there yet"
    assert "the table is not complete yet" in messages[1]


def test_a_table_that_never_comes_ends_the_wait_with_what_is_missing(tmp_path: Path) -> None:
    clock = SleptClock()

    with pytest.raises(RanktableError, match=r"not there after 10 s: .*global_ranktable.json is not there yet"):
        wait_for_table(_prefill(tmp_path), _own(tmp_path), WaitLimits(10.0, no_lines, clock, clock.sleep))


@pytest.mark.parametrize(("prefill", "decode", "reason"), [
    ("192.0.2.3", "192.0.2.2", "is not in the global table"),
    ("192.0.2.3", "192.0.2.1", "this pod's entry is decode and not prefill"),
])  # fmt: skip
def test_an_entry_of_another_pod_is_not_ones_own(tmp_path: Path, prefill: str, decode: str, reason: str) -> None:
    clock = SleptClock()
    _table(tmp_path / TABLE_FILE, prefill=prefill, decode=decode)

    with pytest.raises(RanktableError, match=reason):
        wait_for_table(_prefill(tmp_path), _own(tmp_path), WaitLimits(10.0, no_lines, clock, clock.sleep))


def test_the_process_gets_its_tables_and_its_own_secret_file(tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    mounted.write_text("s" * 64 + "\n")
    mounted.chmod(0o440)
    start = Start("prefill", "192.0.2.1", tmp_path / "state", secret=mounted, device_type="cpu")

    reported = variables(start, Path("local"), Path("global"))

    copied = Path(reported.pop("PDSERVE_SECRET_FILE"))
    assert reported == {"GLOBAL_RANK_TABLE_FILE_PATH": "global", "RANK_TABLE_FILE_PATH": "local"}
    assert (copied.read_text(), copied.stat().st_mode & 0o777) == ("s" * 64 + "\n", 0o600)
    with pytest.raises(RanktableError, match=r"--secret .*none: cannot be read: .*No such file"):
        variables(Start("prefill", "192.0.2.1", tmp_path, secret=tmp_path / "none"), Path("l"), Path("g"))


def test_the_environment_is_what_start_servers_resolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = list[tuple[str, list[str], dict[str, str]]]()
    monkeypatch.setattr(os, "execvpe", lambda *words: reported.append(words))
    parts = [part("scheduler", "192.0.2.9"), part("prefill", "192.0.2.1"), part("decode", "192.0.2.2")]
    pods = [Pod(str(number), ("192.0.2.1", "192.0.2.2"), leaving=False) for number in range(3)]
    decision = decide({str(number): text for number, text in enumerate(parts)}, pods, None, ClusterSize(1, 1))
    (tmp_path / TABLE_FILE).write_text(decision.text)
    flags = ["--role", "prefill", "--ip", "192.0.2.1", "--folder", str(tmp_path), "--device-type", "cpu"]

    assert main(["start", *flags, "--timeout", "5", "--", "sh", "start_servers.sh", "--model=m"]) == 0

    program, words, environ = reported[0]
    assert (program, words) == ("sh", ["sh", "start_servers.sh", "--model=m"])
    assert resolve(environ).name == "prefill-0"


@pytest.mark.parametrize(("words", "message"), [
    ([], "no command: write it after --"),
    (["no-such-program"], "no-such-program: cannot be run: No such file"),
])  # fmt: skip
def test_a_command_that_cannot_be_run_is_reported(words: list[str], message: str) -> None:
    with pytest.raises(RanktableError, match=message):
        exec_command(words, {})


def test_a_wrong_command_line_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["write", "--parts", "a", "--ranktable", "b", "--selector", "c", "--prefill", "0", "--decode", "1"]) == 2
    )
    assert main(["start", "--role", "prefill"]) == 2

    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "ranktable kube: --prefill is 0, but must be at least 1"
    assert "the following arguments are required: --ip, --folder" in lines[1]


def _nodes(folder: Path, *names: str) -> Path:
    (folder / "dev").mkdir()
    for name in names:
        (folder / "dev" / name).touch()
    return folder / "dev"


def test_npus_are_those_whose_nodes_the_container_has(tmp_path: Path) -> None:
    dev = _nodes(tmp_path, "davinci4", "davinci5", "davinci_manager")

    assert own_device_ids("npu", 2, {}, dev) == ["4", "5"]


@pytest.mark.parametrize("value", ["4,5", "Ascend910-4,Ascend910-5"])
def test_of_all_a_hosts_npus_those_named_by_the_plugin_count(tmp_path: Path, value: str) -> None:
    dev = _nodes(tmp_path, *(f"davinci{number}" for number in range(8)))

    assert own_device_ids("npu", 2, {"ASCEND_VISIBLE_DEVICES": value}, dev) == ["4", "5"]


def test_gpus_named_by_uuid_are_those_whose_nodes_exist(tmp_path: Path) -> None:
    dev = _nodes(tmp_path, "nvidia3", "nvidia1", "nvidiactl")

    assert own_device_ids("cuda", 2, {"NVIDIA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, dev) == ["1", "3"]


def test_a_wrong_number_of_devices_is_refused_with_both_numbers(tmp_path: Path) -> None:
    dev = _nodes(tmp_path, "davinci0")

    with pytest.raises(RanktableError, match=r"--num-devices is 2, but the number of npu devices in .* is 1 \(0\)"):
        own_device_ids("npu", 2, {}, dev)
    with pytest.raises(RanktableError, match="--num-devices is 0, but must be at least 1"):
        own_device_ids("cpu", 0, {}, dev)


def test_cpu_shares_count_from_0(tmp_path: Path) -> None:
    assert own_device_ids("cpu", 2, {}, tmp_path) == ["0", "1"]
