"""A receiver in a process of its own, its pool in device memory: prints a ticket, then all bytes of the pool."""

import sys

from kvtransfer import transport_table
from tests.kvtransfer.devices import DevicePool, offer_cuda_ipc
from tests.kvtransfer.receiver_process import LAYOUT, serve


def main() -> None:
    """Serve one ticket over the given transports, into a pool on the given device."""
    transport_table._MAKERS, transport_table.NAMES = offer_cuda_ipc(None)
    pool = DevicePool(LAYOUT, device=sys.argv[2])
    serve(pool, lambda: bytes(pool.tensor.cpu().tolist()), within_s=60)


if __name__ == "__main__":
    main()
