"""`pdserve bench pd`: prefill and decode apart beside colocated instances, on the same cores."""

from pdserve.bench.pd.command import main

__all__ = ["main"]
