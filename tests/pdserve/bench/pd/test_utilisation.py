"""How busy instances were and how long a hand-off took, computed from two metrics pages."""

import pytest

from pdserve.bench.pd.utilisation import read_counters, utilisation_between
from pdserve.client import parse_metrics


def page(prefill_s: float, decode_s: float, hops: int, hop_s: float, hop_bytes: int) -> str:
    return f"""\
# HELP pdserve_instance_info Instances
pdserve_instance_info{{instance="a1",name="prefill-0",role="prefill"}} 1.0
pdserve_instance_info{{instance="b2",name="decode-0",role="decode"}} 1.0
pdserve_step_seconds_total{{instance="a1"}} {prefill_s}
pdserve_step_seconds_total{{instance="b2"}} {decode_s}
pdserve_kv_hop_seconds_bucket{{le="0.1"}} {hops}
pdserve_kv_hop_seconds_count {hops}
pdserve_kv_hop_seconds_sum {hop_s}
pdserve_kv_hop_bytes_sum {hop_bytes}
"""


def test_shares_and_hops_are_differences_over_the_time() -> None:
    before, after = (
        read_counters(parse_metrics(text)) for text in (page(1, 2, 10, 0.5, 1000), page(3, 6, 14, 0.54, 1400))
    )

    use = utilisation_between(before, after, 4.0)

    assert use.busy == {"prefill-0": 0.5, "decode-0": 1.0}
    assert use.hops == 4
    assert use.hop_ms == pytest.approx(10.0)
    assert use.hop_bytes == pytest.approx(100.0)


def test_colocated_instances_have_no_hop() -> None:
    text = 'pdserve_step_seconds_total{instance="c"} 1.5'

    use = utilisation_between(read_counters(()), read_counters(parse_metrics(text)), 3.0)

    assert use.busy == {"c": 0.5}
    assert (use.hops, use.hop_ms, use.hop_bytes) == (0, None, None)
