"""Tests that need a GPU. Skipped without one, which has been everywhere so far: docs/devices.md."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash

from devices import device_pool
from devices.cuda import CudaKind
from kvtransfer import transport_table
from kvtransfer.cuda_driver import CudaDriver
from kvtransfer.device_memory import DeviceRegion
from kvtransfer.digest import Mover, RegionRuns
from kvtransfer.sender import KvSender
from kvtransfer.staging import whole
from kvtransfer.torch_mover import TorchMover
from tests.kvtransfer import rig as rigs
from tests.kvtransfer.devices import DevicePool, offer_cuda_ipc
from tests.kvtransfer.lifted import LiftedMover
from tests.kvtransfer.receiver_process import BLOCKS, LAYOUT, NUM_TOKENS
from tests.kvtransfer.rig import DEADLINE_S, TENSORS, Recorder, address, make_rig, until
from tests.kvtransfer.test_digest import (  # noqa: F401  the contract of movers, run here with this file's `mover`
    test_a_read_only_mapping_is_a_source_and_no_target,
    test_a_set_flag_stops_a_move_before_its_first_byte,
    test_bytes_cut_differently_are_copied_in_order_and_digested,
    test_heads_of_a_shuffled_pool_reach_the_other_pool,
    test_large_runs_are_exact_at_any_alignment,
    test_runs_past_their_region_are_refused_with_both_numbers,
    test_unequal_sizes_are_refused_with_both_numbers,
)
from wire.kv_layout import PoolLayout
from wire.types import KvEndpoint, Ticket

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device: all tests that need a GPU", allow_module_level=True)

ROOT = Path(__file__).parents[2]
TWO_CARDS = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="torch sees one CUDA device: NCCL allows one rank per card"
)
P_BLOCKS = (3, 9, 4, 5, 20)


@pytest.fixture(scope="module", params=[("cuda:0", "cuda:0"), (None, "cuda:0"), ("cuda:0", None)])
def mover(request: pytest.FixtureRequest) -> Mover:
    return LiftedMover(*request.param)


def test_the_mover_waits_for_the_kernels_that_fill_a_pool() -> None:
    memory, filled = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0"), torch.cuda.Event()  # type: ignore[no-untyped-call]
    busy = torch.randn(4096, 4096, device="cuda:0")
    region = DeviceRegion(memory, ready=lambda: filled.wait())
    place = RegionRuns(region, 0, whole(memory.numel()))

    for _ in range(50):
        busy = (busy @ busy).clamp_(-1, 1)
    memory.fill_(7)
    filled.record()
    digest = TorchMover().digest(place)

    assert digest == xxhash.xxh3_64_intdigest(b"\7" * memory.numel())


class CardPool(device_pool.DevicePool):
    """The product's pool, as the rig makes pools."""

    def __init__(self, layout: PoolLayout, seals: int = 0) -> None:
        super().__init__(layout, CudaKind().open(0))


@pytest.mark.parametrize("digests", [True, False])
def test_a_layers_frames_leave_while_the_next_one_is_computed(digests: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs, "Pool", CardPool)
    busy = torch.randn(4096, 4096, device="cuda:0")
    with make_rig("tcp", digests=digests) as rig:
        pool, starts = rig.p_pool, [*rig.p_pool.layout.offsets[::2], rig.p_pool.layout.total_bytes]
        assert isinstance(pool, CardPool)
        for turn in range(2):  # the first one allocates what is allocated once: staging memory, pinned memory, streams
            before, ticket = rig.receiver.bytes_received, rig.open(NUM_TOKENS, BLOCKS)
            rig.sender.begin(ticket)
            for layer in range(3):
                for _ in range(50):
                    busy = (busy @ busy).clamp_(-1, 1)
                pool.tensor[starts[layer] : starts[layer + 1]].fill_(10 * turn + layer)
                pool.written()
                rig.sender.put(ticket.ticket_id, layer, 0, NUM_TOKENS, P_BLOCKS)
            last = pool.mark()
            rig.sender.commit(ticket.ticket_id, b"prompt")
            until(lambda before=before: rig.receiver.bytes_received > before)  # type: ignore[misc]
            has_left_early = last is not None and not last.is_done
            rig.events.wait("acked", ticket.ticket_id)

        assert has_left_early
        arrived = rig.d_pool.tensor.cpu()  # type: ignore[attr-defined]
        for tensor, spec in enumerate(TENSORS):
            where = [address(rig.d_pool.layout, tensor, BLOCKS, token) for token in range(NUM_TOKENS)]
            assert all((arrived[one] == 10 + spec.layer).all() for one in where), tensor


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp", pytest.param("process_group", marks=TWO_CARDS)])
@pytest.mark.parametrize("digests", [True, False])
def test_a_hand_off_between_two_processes_is_byte_exact(
    transport: str, digests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver sees the last card alone, as an instance or a rank with a card of its own."""
    makers, names = offer_cuda_ipc(None)
    monkeypatch.setattr(transport_table, "_MAKERS", makers)
    monkeypatch.setattr(transport_table, "NAMES", names)
    pool, events = DevicePool(LAYOUT, device="cuda:0"), Recorder()
    data = random.Random(5).randbytes(LAYOUT.total_bytes)
    pool.tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    torch.cuda.synchronize()
    sender = KvSender(
        pool, instance_id="p", epoch=1, transports=(transport,), events=events, progress_age=lambda: 0.0,
        connect_timeout_s=DEADLINE_S, progress_timeout_s=60.0, digests=digests,
    )  # fmt: skip
    count = torch.cuda.device_count()
    shown = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": shown[count - 1], "PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-m", "tests.kvtransfer.device_process", transport, "cuda:0"]
    with subprocess.Popen(
        code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdin is not None
        fields = json.loads(receiver.stdout.readline())
        fields["endpoints"] = tuple(KvEndpoint(**endpoint) for endpoint in fields["endpoints"])
        ticket = Ticket(**fields)
        sender.begin(ticket)
        for layer in range(3):
            sender.put(ticket.ticket_id, layer, 0, NUM_TOKENS, P_BLOCKS)
        sender.commit(ticket.ticket_id, b"prompt")
        received = bytes.fromhex(receiver.stdout.readline())
        events.wait("acked", ticket.ticket_id)
        sender.close()
        receiver.stdin.close()

    assert events.acks[ticket.ticket_id].transport == transport
    for tensor in range(len(TENSORS)):
        for token in range(NUM_TOKENS):
            sent = data[address(LAYOUT, tensor, P_BLOCKS, token)]
            assert received[address(LAYOUT, tensor, BLOCKS, token)] == sent, (tensor, token)


def test_a_pool_of_expandable_segments_is_refused_with_a_reason() -> None:
    code = (
        "import torch; from kvtransfer.cuda_driver import CudaDriver;"
        "print(CudaDriver().lacking(torch.zeros(1 << 20, dtype=torch.uint8, device='cuda:0')))"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True
    ).stdout

    assert "cannot be exported" in output
    assert CudaDriver().lacking(torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:0")) is None
