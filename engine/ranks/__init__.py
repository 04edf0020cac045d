"""Tensor parallelism: rank 0 in the instance's process, the others as child processes that step with it."""
