"""`pdserve bench pd`: P/D compared with colocated instances on the same cores."""

from pdserve.bench.pd.command import main

__all__ = ["main"]
