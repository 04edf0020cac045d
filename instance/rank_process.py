"""The process of a rank other than 0 whose pool is on its own device: it runs steps, and transfers its own KV.

python -P -m instance.rank_process CHANNEL_FD PARENT_PID
"""

import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

from devices.interface import Memory
from engine.ranks.process import leave
from engine.ranks.process import main as serve_rank
from processes.rank_payloads import from_json


def main(argv: list[str]) -> int:
    """Serve one rank; return the exit status."""
    return serve_rank(argv, _open_transfer)


def _open_transfer(
    pool: Memory, settings: bytes, fd: int, step_age: Callable[[], float]
) -> AbstractContextManager[object]:  # fmt: skip
    from kvtransfer.rank_settings import RankTransferSettings
    from kvtransfer.rank_transfer import RankTransfer

    return RankTransfer(pool, from_json(RankTransferSettings, settings), socket.socket(fileno=fd), step_age)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
