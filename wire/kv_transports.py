"""What the scheduler and the commands know of the KV transports that kvtransfer implements."""

ONE_HOST = ("cuda_ipc", "shm")
"""Their links begin on an abstract Unix socket: out of reach where `host_id` differs, and without a port."""

ONLY_NAMED = ("process_group", "mooncake")
"""Used where --kv-transport names them, so that nobody misses them elsewhere."""

NOT_OFFERED = "not offered there"
ELSEWHERE = "another host or network namespace"
OUT_OF_REACH = (NOT_OFFERED, ELSEWHERE)
"""Why a transport was never to be had between two instances; any other reason is a failure."""
