"""Devices as Ray resources."""

import pytest

from pdserve.ray_cluster.need import Need, need_of, no_room


@pytest.mark.parametrize(
    ("device", "ranks", "bundle"),
    [
        ("npu", 2, {"NPU": 2.0}), ("cuda", 1, {"GPU": 1.0}), ("cpu", 4, {"CPU": 4.0}), ("auto", 1, {"CPU": 1.0}),
    ],
)  # fmt: skip
def test_each_rank_is_one_device_of_its_kind(device: str, ranks: int, bundle: dict[str, float]) -> None:
    assert need_of(device, ranks).bundle == bundle


def test_a_cluster_without_room_is_reported_with_its_resources() -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 8.0, "NPU": 4.0}]

    assert no_room(Need("npu", 2), 3, "spread", nodes, 60.0) == (
        "the Ray cluster had no room for 3 instances of 2 NPU each (spread) within 60 s: it has 2 nodes, with NPU 4 "
        "(including those in use)"
    )
    assert no_room(Need("cuda", 1), 2, "pack", nodes, 60.0).endswith("it has 2 nodes, with no GPU on any")
