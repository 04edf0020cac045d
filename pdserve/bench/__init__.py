"""`pdserve bench`: what this machine gets out of the product, beside what it could."""

from pdserve.bench.command import main

__all__ = ["main"]
