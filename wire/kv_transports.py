"""KV transport names shared by the scheduler and the commands; kvtransfer implements the transports."""

ONE_HOST = ("cuda_ipc", "shm")
"""These transports connect over an abstract Unix socket: unreachable where `host_id` differs, and without a port."""

ONLY_NAMED = ("process_group", "mooncake")
"""Used only where --kv-transport names them, so elsewhere their absence is not reported."""

NOT_OFFERED = "not offered there"
ELSEWHERE = "another host or network namespace"
OUT_OF_REACH = (NOT_OFFERED, ELSEWHERE)
"""Why two instances could never use a transport; any other reason is a failure."""
