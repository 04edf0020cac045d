"""Place actors on the nodes of a Ray cluster; print the placements: `python place_actors.py ADDRESS KIND RANKS COUNT`.

It runs in its own process, as `up` does: Ray's threads end with it.
"""

import sys
import time

from pdserve import __version__
from pdserve.ray_cluster.messages import NodeRequest, encode
from pdserve.ray_cluster.need import need_of
from pdserve.ray_cluster.session import RaySession


def _main(address: str, kind: str, ranks: str, count: str) -> None:
    session = RaySession(address, 0)
    try:
        session.reserve(need_of(kind, int(ranks)), int(count), "pack", 20.0, print)
        wanted = NodeRequest(kind, tuple(str(100 + rank) for rank in range(int(ranks))), __version__)
        pending = [session.place(index).call("place", encode(wanted)) for index in range(int(count))]
        deadline = time.monotonic() + 300
        for one in pending:
            while (answer := one.poll()) is None:
                assert time.monotonic() < deadline
            print(answer, flush=True)
    finally:
        session.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
