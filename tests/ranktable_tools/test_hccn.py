"""hccn_tool's recorded answers, and how it is called."""

import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from ranktable_tools.errors import RanktableError
from ranktable_tools.hccn import default_device_type, device_addresses, find_hccn_tool, parse_address, run_tool

ANSWER = "ipaddr:10.0.245.11\nnetmask:255.255.255.0\n"
UNSET = "Get ipconf failed, because no ip was preset there!\n"
ABSENT = "The device is not exist!\n"
VNIC = "vnic link status: UP\nvnic ipaddr: 192.168.2.199\nvnic netmask: 255.255.255.0\n"


def test_the_address_is_read_from_the_first_line() -> None:
    assert parse_address(ANSWER, "device 0") == "10.0.245.11"


@pytest.mark.parametrize("answer", [UNSET, ABSENT, VNIC, "ipaddr:\n", "ipaddr:10.**.**.1"])
def test_another_answer_is_passed_on_in_the_tools_words(answer: str) -> None:
    with pytest.raises(RanktableError) as caught:
        parse_address(answer, "device 3: hccn_tool -i 3 -ip -g")

    assert str(caught.value) == f"device 3: hccn_tool -i 3 -ip -g said: {' '.join(answer.split())}"


def test_silence_is_told_too() -> None:
    with pytest.raises(RanktableError, match="said: nothing"):
        parse_address("", "device 3")


def test_devices_are_asked_one_after_the_other() -> None:
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> str:
        asked.append(command)
        return f"ipaddr:10.0.0.{command[2]}\nnetmask:255.255.255.0\n"

    assert device_addresses("/x/hccn_tool", ["4", "5"], run) == {"4": "10.0.0.4", "5": "10.0.0.5"}
    assert asked == [("/x/hccn_tool", "-i", "4", "-ip", "-g"), ("/x/hccn_tool", "-i", "5", "-ip", "-g")]


def test_two_npus_with_one_address_are_refused() -> None:
    with pytest.raises(RanktableError, match=r"device 5: device_ip 10\.0\.245\.11 is also that of device 4"):
        device_addresses("hccn_tool", ["4", "5"], lambda command: ANSWER)


def test_a_real_process_that_fails_is_told_in_its_own_words(tmp_path: Path) -> None:
    tool = tmp_path / "hccn_tool"
    tool.write_text(f"#!/bin/sh\necho '{UNSET.strip()}'\nexit 13\n")
    tool.chmod(stat.S_IRWXU)

    with pytest.raises(RanktableError, match=r"device 4: .*hccn_tool -i 4 -ip -g said: Get ipconf failed"):
        device_addresses(str(tool), ["4"])


def test_a_tool_that_is_not_there_is_named() -> None:
    with pytest.raises(RanktableError, match=r"/none/hccn_tool -i: cannot be run: No such file or directory"):
        run_tool(("/none/hccn_tool", "-i"))


def test_the_tool_is_found_by_its_variable() -> None:
    assert find_hccn_tool({"HCCN_TOOL_PATH": "/x/hccn_tool"}) == "/x/hccn_tool"


def test_the_device_type_is_npu_where_tool_and_device_are(tmp_path: Path) -> None:
    environ = {"HCCN_TOOL_PATH": "/x/hccn_tool"}
    before = default_device_type(environ, tmp_path)
    (tmp_path / "davinci4").touch()

    assert (before, default_device_type(environ, tmp_path)) == ("cpu", "npu")
