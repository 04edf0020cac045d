"""A receiver in a process of its own: prints a ticket, then the bytes that were committed, or how it ended."""

import dataclasses
import json
import secrets
import sys
from collections.abc import Callable

from kvtransfer.interface import PoolMemory
from kvtransfer.receiver import KvReceiver
from tests.kvtransfer.rig import TENSORS, Pool, Recorder, read
from wire.kv_layout import PoolLayout

LAYOUT = PoolLayout(TENSORS, num_blocks=64, block_size=4)
BLOCKS = (7, 8, 30, 2, 11)
NUM_TOKENS = 20


def serve(pool: PoolMemory, received: Callable[[], bytes], *, within_s: float) -> None:
    """Serve one ticket into `pool` over the transports that the first argument names, until the test ends the input."""
    events = Recorder()
    receiver = KvReceiver(
        pool, instance_id="decode-0", epoch=77, host="127.0.0.1", transports=sys.argv[1].split(","), events=events
    )
    ticket = receiver.open(secrets.token_hex(16), num_tokens=NUM_TOKENS, first_token=0, block_ids=BLOCKS)
    print(json.dumps(dataclasses.asdict(ticket)), flush=True)
    with events.changed:
        events.changed.wait_for(lambda: bool(events.commits or events.ends), within_s)
    committed = ticket.ticket_id in events.commits
    print(received().hex() if committed else f"ended: {events.ends}", flush=True)
    sys.stdin.read()
    receiver.close()


def main() -> None:
    """Receive into host memory, and print the committed tokens tensor by tensor."""
    pool = Pool(LAYOUT)

    def received() -> bytes:
        tokens = read(pool, BLOCKS, NUM_TOKENS)
        return b"".join(tokens[tensor] for tensor in sorted(tokens))

    serve(pool, received, within_s=20)


if __name__ == "__main__":
    main()
