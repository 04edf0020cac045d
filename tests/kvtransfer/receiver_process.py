"""A receiver in a process of its own: prints a ticket, then the digest of what was committed, or how it ended."""

import dataclasses
import json
import secrets
import sys

from kvtransfer.receiver import KvReceiver
from tests.kvtransfer.rig import TENSORS, Pool, Recorder, read
from wire.kv_layout import PoolLayout

BLOCKS = (7, 8, 30, 2, 11)
NUM_TOKENS = 20


def main() -> None:
    """Serve one ticket over the transports named."""
    pool, events = Pool(PoolLayout(TENSORS, num_blocks=64, block_size=4)), Recorder()
    receiver = KvReceiver(
        pool, instance_id="decode-0", epoch=77, host="127.0.0.1", transports=sys.argv[1].split(","), events=events
    )
    ticket = receiver.open(secrets.token_hex(16), num_tokens=NUM_TOKENS, first_token=0, block_ids=BLOCKS)
    print(json.dumps(dataclasses.asdict(ticket)), flush=True)
    with events.changed:
        events.changed.wait_for(lambda: bool(events.commits or events.ends), 20)
    if ticket.ticket_id in events.commits:
        tokens = read(pool, BLOCKS, NUM_TOKENS)
        print(b"".join(tokens[tensor] for tensor in sorted(tokens)).hex(), flush=True)
    else:
        print(f"ended: {events.ends}", flush=True)
    sys.stdin.read()  # until the test ends this process
    receiver.close()


if __name__ == "__main__":
    main()
