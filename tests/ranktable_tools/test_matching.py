"""Which entry a local table belongs to if two are similar."""

import pytest

from ranktable_tools.errors import RanktableError
from ranktable_tools.matching import find_own_entry
from ranktable_tools.tables import GlobalTable, LocalTable, TableDevice, TableServer

GPU = (TableDevice("0", "192.0.2.1", "0"),)
TABLE = GlobalTable(
    TableServer("192.0.2.1", "192.0.2.1"),
    (TableServer("192.0.2.1", "192.0.2.1", GPU, 8088),),
    (TableServer("192.0.2.1", "192.0.2.1", GPU, 8089),),
)


@pytest.mark.parametrize(("port", "role"), [(8088, "prefill"), (8089, "decode")])
def test_instances_sharing_a_gpu_are_matched_by_port(port: int, role: str) -> None:
    entry = find_own_entry(LocalTable(TableServer("192.0.2.1", "192.0.2.1", GPU, port)), TABLE)

    assert entry is not None
    assert entry.role == role


def test_a_port_alone_does_not_distinguish() -> None:
    entry = find_own_entry(LocalTable(TableServer("192.0.2.1", "192.0.2.1", GPU)), TABLE)

    assert entry is not None


def test_devices_count_more_than_ports() -> None:
    other = (TableDevice("1", "192.0.2.1", "0"),)

    with pytest.raises(RanktableError, match="nearest entry is decode-0"):
        find_own_entry(LocalTable(TableServer("192.0.2.1", "192.0.2.1", other, 8089)), TABLE)
