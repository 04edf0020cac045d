"""Counters of several ranks are combined into one instance's."""

from kvtransfer.interface import SendStats
from kvtransfer.receiver_counts import ReceiverCounts
from kvtransfer.totals import add_counts, merge_links, merge_stats
from wire.load import LinkStatus


def link(peer_id: str, transport: str, state: str = "up", **figures: float) -> LinkStatus:
    return LinkStatus(peer_id, transport, state, epoch=1, bytes_sent=10, failures=1, **figures)  # type: ignore[arg-type]


def test_shares_add_up_and_the_slowest_gives_the_time() -> None:
    parts = [SendStats("shm", 100, 0.5, 1, 60), SendStats("tcp", 50, 0.7, 0, 20), SendStats("shm", 1, 0.1, 2, 0)]

    assert merge_stats(parts) == SendStats("shm+tcp", 151, 0.7, 3, 80)
    assert merge_stats(parts[:1]) == parts[0]


def test_links_to_the_ranks_of_one_process_are_one_status() -> None:
    statuses = [
        (("d", 7), link("d", "shm", bytes_per_s=5e9, round_trip_s=1e-4)),
        (("d", 7), link("d", "tcp", "draining", bytes_per_s=2e9, round_trip_s=3e-4)),
        (("d", 8), link("d", "shm")),
        (("e", 9), link("e", "tcp")),
    ]

    merged = merge_links(statuses)

    assert [(one.peer_id, one.transport, one.state) for one in merged] == [
        ("d", "shm+tcp", "draining"), ("d", "shm", "up"), ("e", "tcp", "up"),
    ]  # fmt: skip
    assert (merged[0].bytes_sent, merged[0].failures) == (20, 2)
    assert (merged[0].bytes_per_s, merged[0].round_trip_s) == (2e9, 3e-4)


def test_a_transport_that_ranks_measured_as_slower_is_named_once() -> None:
    slower = [f"mooncake: slower than tcp ({rate}.00 GB/s against 9.00 GB/s)" for rate in range(3)]
    ranks = [("shm: another host", slower[0], "cuda_ipc: no"), (slower[1],), ("cuda_ipc: at rank 2: no", slower[2])]

    (merged,) = merge_links((("d", 7), link("d", "tcp", passed_over=own)) for own in ranks)  # type: ignore[arg-type]

    assert merged.passed_over == ("shm: another host", slower[2], "cuda_ipc: no", "cuda_ipc: at rank 2: no")


def test_counts_of_all_ranks_add_up() -> None:
    total = add_counts([ReceiverCounts(bytes_received=3, renewals=1), ReceiverCounts(bytes_received=4)])

    assert total == ReceiverCounts(bytes_received=7, renewals=1)
