"""The table of instances, from a state and a metrics page."""

import os

from pdserve.client import parse_metrics
from pdserve.run_folder import ClusterState, ProcessRecord, start_time
from pdserve.status import figures, table


def test_the_table_shows_what_metrics_say_and_who_is_gone() -> None:
    started = start_time(os.getpid()) or 0
    state = ClusterState(
        "http://127.0.0.1:9000",
        "m",
        (
            ProcessRecord("prefill-0", "prefill", os.getpid(), started, "127.0.0.1:1", "/l"),
            ProcessRecord("decode-0", "decode", os.getpid(), started + 1, "127.0.0.1:2", "/l"),
        ),
    )
    page = (
        'pdserve_instance_info{address="127.0.0.1:1",instance="p",role="prefill",state="living"} 1\n'
        'pdserve_link_up{instance="p",peer="d",transport="shm"} 1\n'
        'pdserve_kv_blocks_used{instance="p"} 3\npdserve_kv_blocks_total{instance="p"} 64\n'
        'pdserve_running{instance="p"} 2\n'
    )

    lines = table(state, figures(parse_metrics(page)))

    assert lines[0].split()[:4] == ["NAME", "ROLE", "ADDRESS", "PID"]
    assert lines[1].split()[4:] == ["living", "3/64", "2", "shm", "to", "d", "up"]
    assert lines[2].split()[4:6] == ["gone", "-"]
