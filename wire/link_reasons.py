"""Why two instances could never use a KV transport, as link statuses report it; any other reason is a failure."""

NOT_OFFERED = "not offered there"
ELSEWHERE = "another host or network namespace"
OUT_OF_REACH = (NOT_OFFERED, ELSEWHERE)
