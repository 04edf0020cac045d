"""What processes on one host need: child processes that can be killed, frames, the channel of ranks, failpoints."""
