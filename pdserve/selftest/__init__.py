"""`pdserve selftest`: test that this machine's device computes, transfers KV and captures graphs correctly."""

from pdserve.selftest.command import main

__all__ = ["main"]
