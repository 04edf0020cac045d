"""npu-smi's recorded output on A2, A3 and Ascend 950."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktable_tools.devices.hccn_answers import (
    parse_address,
    parse_link,
    parse_net_health,
    parse_ping,
    parse_tls_switch,
)
from ranktable_tools.devices.hccn_conf import parse_conf
from ranktable_tools.devices.npu_smi import (
    Chip,
    NpuProcess,
    NpuState,
    SuperPod,
    parse_fields,
    parse_map,
    parse_processes,
    parse_states,
    parse_super_pod,
)
from ranktable_tools.devices.nvidia_smi import parse_gpus
from tests.ranktable_tools import recorded


@pytest.mark.parametrize(
    ("answer", "chips"),
    [
        (recorded.MAP_A2, [Chip(0, 0, "0", "Ascend 910B4"), Chip(1, 0, "1", "Ascend 910B4")]),
        (recorded.MAP_A3, [Chip(0, 0, "0", "Ascend910"), Chip(0, 1, "1", "Ascend910")]),
        (recorded.MAP_950, [Chip(0, 0, "0", "Ascend950DT"), Chip(1, 0, "1", "Ascend950DT")]),
        ("dcmi model initialized failed, because the device is used. ret is -8020\n", []),
    ],
)
def test_the_map_names_devices_without_their_management_chips(answer: str, chips: list[Chip]) -> None:
    assert parse_map(answer) == chips


def test_an_a2_has_one_chip_a_card() -> None:
    assert parse_states(recorded.INFO_A2) == [
        NpuState("0", 0, 0, "910B4", "OK"),
        NpuState("1", 1, 0, "910B4", "Warning"),
    ]


def test_an_a3_card_has_two_chips_with_physical_ids() -> None:
    states = parse_states(recorded.INFO_A3)

    assert [(state.device_id, state.npu_id, state.chip_id, state.health) for state in states] == [
        ("0", 0, 0, "OK"), ("1", 0, 1, "OK"), ("2", 1, 0, "OK"), ("3", 1, 1, "Alarm"),
    ]  # fmt: skip


def test_a_950_has_its_name_in_a_separate_cell() -> None:
    assert parse_states(recorded.INFO_950) == [
        NpuState("0", 0, 0, "Ascend950DT", "OK"),
        NpuState("1", 1, 0, "Ascend950DT", "OK"),
    ]


def test_chips_without_physical_ids_are_numbered_consecutively() -> None:
    text = recorded.INFO_A3.replace("Chip  Phy-ID", "Chip        ")
    for chip, physical in (("0", "0"), ("1", "1"), ("0", "2"), ("1", "3")):
        text = text.replace(f"| {chip}     {physical}                   |", f"| {chip}                         |")

    assert [state.device_id for state in parse_states(text)] == ["0", "1", "2", "3"]


def test_processes_are_listed_by_device() -> None:
    assert parse_processes(recorded.INFO_A2) == [NpuProcess("1", 51544, "python3", 58955)]
    assert parse_processes(recorded.INFO_A3) == [
        NpuProcess("0", 3224097, "VLLMWorker_DP", 34309),
        NpuProcess("3", 3224101, "VLLMWorker_DP", 34311, 412),
    ]
    assert parse_processes(recorded.INFO_950) == [NpuProcess("1", 1002, "python", 512, 101)]


@pytest.mark.parametrize("answer", ["", "npu-smi: command not found", "dcmi model initialized failed. ret is -8020"])
def test_an_answer_without_a_table_has_no_device(answer: str) -> None:
    assert parse_states(answer) == []
    assert parse_processes(answer) == []


def test_the_rows_are_read_without_their_separator_lines() -> None:
    for text in (recorded.INFO_A2, recorded.INFO_A3, recorded.INFO_950):
        bare = "\n".join(f"  {line}  " for line in text.splitlines() if line.startswith("|"))

        assert parse_states(bare) == parse_states(text)
        assert parse_processes(bare) == parse_processes(text)


ANSWERS = [value for name, value in vars(recorded).items() if name.isupper() and isinstance(value, str)]


@given(st.sampled_from(ANSWERS), st.data())
def test_no_damaged_output_raises_in_a_parser(answer: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(answer)))
    end = data.draw(st.integers(start, len(answer)))
    damaged = answer[:start] + data.draw(st.text(max_size=20)) + answer[end:]

    for parse in (parse_states, parse_processes, parse_map, parse_super_pod, parse_conf, parse_gpus):
        parse(damaged)
    for parse_one in (parse_address, parse_link, parse_net_health, parse_tls_switch, parse_ping):
        parse_one(damaged)


def test_only_an_a3_has_a_super_pod() -> None:
    assert parse_super_pod(recorded.SUPER_POD) == SuperPod("167772160", "0")
    assert parse_super_pod(recorded.NO_SUPER_POD) is None


def test_the_boards_versions_are_read() -> None:
    fields = dict(parse_fields(recorded.BOARD))

    assert (fields["Software Version"], fields["Firmware Version"]) == ("23.0.5", "7.1.0.7.220")
