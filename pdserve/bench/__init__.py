"""`pdserve bench`: measure the product on this machine, and compare with the machine's limits."""

from pdserve.bench.command import main

__all__ = ["main"]
