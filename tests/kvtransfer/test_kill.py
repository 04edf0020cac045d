"""A prefill process killed in the middle of a hand-off: the receiver notices at once and keeps nothing."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.kvtransfer.rig import DEADLINE_S, make_rig

_SENDER = """
import json, sys, threading
from kvtransfer.sender import KvSender
from tests.kvtransfer.rig import TENSORS, Pool, Recorder, fill
from wire.kv_layout import PoolLayout
from wire.types import KvEndpoint, Ticket

fields = json.loads(sys.stdin.readline())
fields["endpoints"] = tuple(KvEndpoint(**endpoint) for endpoint in fields["endpoints"])
ticket, pool = Ticket(**fields), Pool(PoolLayout(TENSORS, num_blocks=64, block_size=4))
fill(pool, range(5), 20)
transport = ticket.endpoints[0].transport
sender = KvSender(pool, instance_id="p", epoch=1, transports=(transport,), events=Recorder(), progress_age=lambda: 0.0)
sender.begin(ticket)
for layer in range(3):
    sender.put(ticket.ticket_id, layer, 0, 20, range(5))
threading.Event().wait(300)
"""


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_sender_ends_its_ticket_and_the_next_one_arrives(transport: str) -> None:
    environment = os.environ | {"PDSERVE_FAILPOINTS": "kv.send.mid=kill9@4"}
    root = Path(__file__).parents[2]
    with make_rig(transport) as rig:
        ticket, after = rig.open(20, (1, 2, 3, 4, 5)), rig.open(20, (11, 12, 13, 14, 15))

        killed = subprocess.run(
            [sys.executable, "-c", _SENDER], input=json.dumps(asdict(ticket)) + "\n", text=True, cwd=root,
            env=environment, timeout=3 * DEADLINE_S, check=False,
        )  # fmt: skip
        rig.events.wait("ended", ticket.ticket_id)
        rig.hand_over(after, (0, 1, 2, 3, 4))
        rig.events.wait("acked", after.ticket_id)

        assert killed.returncode == -signal.SIGKILL
        assert rig.events.ends[ticket.ticket_id][0] == (1, 2, 3, 4, 5)
        assert rig.events.count("ended") == 1
