"""`pdserve selftest`: does what this machine has compute, move and capture what it should?"""

from pdserve.selftest.command import main

__all__ = ["main"]
