"""gen with only the two lists, on machines with and without accelerators: device kind and addresses are detected."""

from dataclasses import replace
from pathlib import Path

import pytest

from ranktable_tools import commands
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.errors import RanktableError
from ranktable_tools.guide import main
from tests.ranktable_tools import recorded
from tests.ranktable_tools.stub_tools import calls, write_stub

IP = "10.0.0.18"


class Host:
    """A machine below a folder: device nodes, /etc/hccn.conf and tools on PATH."""

    def __init__(self, root: Path, *nodes: str) -> None:
        self.root, self.tools, self.printed = root, root / "tools", list[str]()
        self.tables = root / "tables"
        for folder in (root / "dev", root / "etc"):
            folder.mkdir()
        for node in nodes:
            (root / "dev" / node).touch()

    def gen(self, prefill: str = "4,5", decode: str = "6,7", **options: str) -> list[str | None]:
        """Run gen; return the device addresses in global order."""
        arguments = GenArguments(prefill.split(), decode.split(), True, str(self.tables), ip=IP, **options)  # type: ignore[arg-type]
        made = gen(arguments, self.printed.append, {"PATH": str(self.tools)}, self.root)
        return [device.device_ip for instance in made.part.instances for device in instance.server.devices]


NPUS = [f"davinci{number}" for number in range(8)]


def test_hccn_tool_runs_for_each_device_in_turn(tmp_path: Path) -> None:
    host = Host(tmp_path, *NPUS)
    answers = {f"-i {number} -ip -g": recorded.IP.replace("245.11", f"0.{number}") for number in range(8)}
    write_stub(host.tools, "hccn_tool", answers)

    assert host.gen() == ["10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7"]
    assert calls(host.tools) == [f"hccn_tool -i {number} -ip -g" for number in range(4, 8)]


def test_an_a3_pod_uses_the_addresses_of_its_virtual_cards(tmp_path: Path) -> None:
    host = Host(tmp_path, *NPUS)
    answers = {f"-i {number} -vnic -g": recorded.VNIC.replace("2.199", f"2.{number}") for number in range(8)}
    write_stub(host.tools, "hccn_tool", answers, other=recorded.IP_UNSET)

    with pytest.raises(RanktableError, match=r"no ip was preset there!; other sources: --device-ip-from vnic"):
        host.gen()
    assert not host.tables.exists()
    assert host.gen(device_ip_from="vnic") == [f"192.168.2.{number}" for number in range(4, 8)]


def test_a_container_without_hccn_tool_reads_the_conf_file(tmp_path: Path) -> None:
    host = Host(tmp_path, "davinci0", "davinci1")
    (tmp_path / "etc" / "hccn.conf").write_text(recorded.CONF)

    assert host.gen("0", "1") == ["10.20.11.11", "10.20.11.12"]


def test_an_npu_host_without_addresses_is_refused_and_nothing_written(tmp_path: Path) -> None:
    host = Host(tmp_path, *NPUS)

    with pytest.raises(RanktableError, match=r"hccn_tool is not found .* and .*/etc/hccn\.conf cannot be read"):
        host.gen()
    assert not host.tables.exists()


def test_a_given_device_type_overrides_the_detected_one(tmp_path: Path) -> None:
    host = Host(tmp_path, *NPUS)

    assert host.gen(device_type="cpu") == [IP] * 4
    assert calls(host.tools) == []


@pytest.mark.parametrize("nodes", [(), ("nvidia4", "nvidia5", "nvidia6", "nvidia7")])
def test_without_an_accelerator_a_device_has_the_hosts_address(tmp_path: Path, nodes: tuple[str, ...]) -> None:
    host = Host(tmp_path, *nodes)

    assert host.gen() == [IP] * 4
    assert not [line for line in host.printed if line.startswith("Note:")]


def test_gpus_missing_on_this_machine_are_a_note(tmp_path: Path) -> None:
    host = Host(tmp_path, "nvidia0")

    host.gen("0", "1")

    note = "Note: this machine has the cuda devices 0, not 1: start the instances on the machine that has those"
    assert note in host.printed


def test_the_guides_tool_accepts_the_device_flags_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_stub(tmp_path, "hccn_tool", {"-i 0 -vnic -g": recorded.VNIC})
    monkeypatch.setenv("HCCN_TOOL_PATH", str(tmp_path / "hccn_tool"))
    line = ["--mode", "gen", "--prefill-server-list", "0", "--ip", IP, "--save-dir", str(tmp_path / "t")]

    assert main([*line, "--device-type", "npu", "--device-ip-from", "vnic"]) == 0
    assert "192.168.2.199" in (tmp_path / "t" / f"local_ranktable_{IP}_0.json").read_text()
    assert main(["--mode", "merge", "--device-type", "npu"]) == 2
    assert "--device-type belongs to --mode gen, not to --mode merge" in capsys.readouterr().err


def test_a_loopback_only_host_is_shown_how_to_name_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "own_address", lambda: "127.0.0.1")
    messages: list[str] = []
    arguments = GenArguments(["0"], ["1"], True, str(tmp_path), device_type="cpu")

    gen(arguments, messages.append)
    gen(replace(arguments, ip="127.0.0.1"), messages.append)

    note = "Note: no address was found at which other hosts reach this one. Please provide it via --ip argument."
    assert messages.count(note) == 1


def test_a_source_of_device_addresses_is_for_npus(tmp_path: Path) -> None:
    with pytest.raises(RanktableError, match="--device-ip-from vnic is for npu; cpu devices have the host's"):
        Host(tmp_path).gen(device_ip_from="vnic")
