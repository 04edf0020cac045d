"""Shared memory between containers of one host: with one network between them it works, across two it is not tried."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtransfer.sender import KvSender
from tests.kvtransfer.receiver_process import NUM_TOKENS
from tests.kvtransfer.rig import DEADLINE_S, TENSORS, Pool, Recorder, fill
from wire.errors import Incompatible, InstanceLost
from wire.kv_layout import PoolLayout
from wire.types import KvEndpoint, Ticket

ALONE = (
    "--mount",
    "--ipc",
    "--uts",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)  # all that a container has, but a network
BLOCKS = (3, 9, 4, 5, 20)
ROOT = Path(__file__).resolve().parents[2]


def _can_unshare() -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(["unshare", *ALONE, "--net", "true"], check=False, capture_output=True).returncode == 0
    return False


pytestmark = pytest.mark.skipif(not _can_unshare(), reason="unshare is not permitted here")


@contextmanager
def _receiver(namespaces: Sequence[str], transports: str) -> Iterator[tuple["subprocess.Popen[str]", Ticket]]:
    command = ["unshare", *namespaces, sys.executable, "-P", "-m", "tests.kvtransfer.receiver_process", transports]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ
    ) as process:
        assert process.stdout is not None
        fields = json.loads(process.stdout.readline())
        fields["endpoints"] = tuple(KvEndpoint(**endpoint) for endpoint in fields["endpoints"])
        try:
            yield process, Ticket(**fields)
        finally:
            process.kill()


def _send(ticket: Ticket, transports: Sequence[str], pool: Pool) -> Recorder:
    events = Recorder()
    sender = KvSender(
        pool, instance_id="prefill-0", epoch=55, transports=transports, events=events, progress_age=lambda: 0.0
    )
    sender.begin(ticket)
    for layer in range(pool.layout.num_layers):
        sender.put(ticket.ticket_id, layer, 0, NUM_TOKENS, BLOCKS)
    sender.commit(ticket.ticket_id, b"prompt")
    with events.changed:
        assert events.changed.wait_for(lambda: bool(events.acks or events.failures), DEADLINE_S)
    sender.close()
    return events


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(PoolLayout(TENSORS, num_blocks=64, block_size=4))
    yield pool
    pool.close()


def test_shm_works_between_containers_that_share_only_the_network(pool: Pool) -> None:
    tokens = fill(pool, BLOCKS, NUM_TOKENS)
    before = set(os.listdir("/dev/shm"))
    with _receiver(ALONE, "shm") as (process, ticket):
        events = _send(ticket, ("shm",), pool)
        assert process.stdout is not None
        arrived = process.stdout.readline().strip()

    assert [stats.transport for stats in events.acks.values()] == ["shm"], events.failures
    assert arrived == b"".join(tokens[tensor] for tensor in sorted(tokens)).hex()
    left = set(os.listdir("/dev/shm")) - before  # those of other tests, too, which run beside this one
    assert [name for name in left if "pdserve" in name or "test-pool" in name] == []


def test_shm_is_not_tried_in_another_network_namespace(pool: Pool) -> None:
    with _receiver(["--net"], "shm") as (_, ticket):
        events = _send(ticket, ("shm",), pool)

    (error,) = events.failures.values()
    assert isinstance(error, InstanceLost | Incompatible)
    assert "another host or network namespace" in str(error)
