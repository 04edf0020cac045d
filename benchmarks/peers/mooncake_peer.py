"""Mooncake's transfer engine over TCP on loopback: the second process holds the bytes, this one reads them.

    $PEERS_HOME/mooncake/bin/python benchmarks/peers/mooncake_peer.py --max-bytes 268435456

Commands come on standard input (peer_process.py). Only the synchronous read is timed; memory is registered beforehand.
The engine listens on all interfaces while it runs.
"""

import sys
import time

from peer_process import Region, arguments, read_line, serve, start_source, write_line


def main() -> None:
    """Run as the reader, or as the source."""
    args = arguments(__doc__)
    from mooncake.engine import TransferEngine

    region, engine = Region(args.max_bytes), TransferEngine()
    check("initialize", engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
    check("register_memory", engine.register_memory(region.address, region.size))
    if args.source:
        region.fill()
        write_line({"address": region.address, "port": engine.get_rpc_port()})
        sys.stdin.read()
        return
    with start_source("--max-bytes", str(args.max_bytes)) as source:
        source_info = read_line(source)
        peer = f"127.0.0.1:{source_info['port']}"

        def read(num_bytes: int) -> float:
            began = time.perf_counter()
            status = engine.transfer_sync_read(peer, region.address, source_info["address"], num_bytes)
            seconds = time.perf_counter() - began
            check("transfer_sync_read", status)
            return seconds

        serve("mooncake", region, source.pid, read)


def check(call: str, status: int) -> None:
    """Exit with a message unless the engine returned 0."""
    if status != 0:
        raise SystemExit(f"mooncake: {call} returned {status}")


if __name__ == "__main__":
    main()
