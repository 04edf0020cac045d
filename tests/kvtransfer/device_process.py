"""A receiver in a process of its own, its pool in device memory: prints a ticket, then all bytes of the pool."""

import dataclasses
import json
import secrets
import sys

from kvtransfer import transports
from kvtransfer.receiver import KvReceiver
from tests.kvtransfer.devices import DevicePool, offer_cuda_ipc
from tests.kvtransfer.receiver_process import BLOCKS, NUM_TOKENS
from tests.kvtransfer.rig import TENSORS, Recorder
from wire.kv_layout import PoolLayout


def main() -> None:
    """Serve one ticket over the transports named, into a pool on the device named."""
    transports._MAKERS, transports.NAMES = offer_cuda_ipc(None)
    pool, events = DevicePool(PoolLayout(TENSORS, num_blocks=64, block_size=4), device=sys.argv[2]), Recorder()
    receiver = KvReceiver(
        pool, instance_id="decode-0", epoch=77, host="127.0.0.1", transports=sys.argv[1].split(","), events=events
    )
    ticket = receiver.open(secrets.token_hex(16), num_tokens=NUM_TOKENS, first_token=0, block_ids=BLOCKS)
    print(json.dumps(dataclasses.asdict(ticket)), flush=True)
    with events.changed:
        events.changed.wait_for(lambda: bool(events.commits or events.ends), 60)
    print(bytes(pool.tensor.cpu().tolist()).hex() if events.commits else f"ended: {events.ends}", flush=True)
    sys.stdin.read()  # until the test ends this process
    receiver.close()


if __name__ == "__main__":
    main()
