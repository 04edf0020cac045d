"""A scheduler's metrics page, and a server that serves it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.pdserve.quiet_server import QuietHandler, serving

PAGE = """\
# HELP pdserve_instance_info Instances of the table
pdserve_instance_info{address="10.0.0.18:8088",instance="P",kv_digests="on",role="prefill",state="living"} 1.0
pdserve_instance_info{address="10.0.0.19:8089",instance="D",kv_digests="off",role="decode",state="living"} 1.0
pdserve_instance_info{address="10.0.0.20:8089",instance="E",kv_digests="",role="decode",state="lost"} 1.0
pdserve_link_up{instance="P",peer="D",transport="tcp"} 1.0
pdserve_link_up{instance="P",peer="E",transport="shm"} 0.0
pdserve_link_round_trip_seconds{instance="P",peer="D",transport="tcp"} 0.00025
pdserve_link_bandwidth_bytes_per_second{instance="P",peer="D",transport="tcp"} 1.17e+08
pdserve_link_failures_total{instance="P",peer="D"} 2.0
pdserve_link_fallbacks_total{instance="P",peer="D"} 1.0
pdserve_link_passed_over{instance="P",peer="D",reason="the peer said \\"no\x1b[31m\\"",transport="shm"} 1.0
"""
READY = '{"ready": true, "instances": [{"address": "10.0.0.20:8089", "state": "lost", "why": "it was \\u001b[31mcut"}]}'


@contextmanager
def served_page(page: str) -> Iterator[str]:
    """Serve a ready scheduler with this page; yield its base URL."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            bodies = {"/metrics": page, "/ready": READY, "/v1/models": json.dumps({"data": [{"id": "m"}]})}
            content = bodies.get(self.path, "").encode()
            self.answer(200 if content else 404, content)

    with serving(Handler) as url:
        yield url
