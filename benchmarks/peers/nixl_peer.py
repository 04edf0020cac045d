"""NIXL between two processes: the second holds the bytes, this one reads them, as vLLM's connector does.

    $PEERS_HOME/nixl/bin/python benchmarks/peers/nixl_peer.py --max-bytes 268435456

Commands come on standard input (peer_process.py). UCX chooses the transports, or UCX_TLS does. Only the read is timed,
from its posting to DONE; metadata, registration and descriptors are prepared beforehand.
"""

import sys
import time

from peer_process import Region, arguments, from_text, read_line, serve, start_source, to_text, write_line

DEADLINE_S = 60.0


def main() -> None:
    """Run as the reader, or as the source."""
    args = arguments(__doc__)
    from nixl._api import nixl_agent, nixl_agent_config

    region = Region(args.max_bytes)
    agent = nixl_agent("source" if args.source else "reader", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(region.address, region.size, 0, "")], "DRAM")
    if args.source:
        region.fill()
        write_line({"address": region.address, "metadata": to_text(agent.get_agent_metadata())})
        sys.stdin.read()
        return
    with start_source("--max-bytes", str(args.max_bytes)) as source:
        source_info = read_line(source)
        peer = agent.add_remote_agent(from_text(source_info["metadata"]))

        def read(num_bytes: int) -> float:
            here = agent.get_xfer_descs([(region.address, num_bytes, 0)], "DRAM")
            there = agent.get_xfer_descs([(source_info["address"], num_bytes, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, peer)
            began = time.perf_counter()
            state = agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                if time.perf_counter() - began > DEADLINE_S:
                    raise SystemExit(f"a read of {num_bytes} bytes took over {DEADLINE_S} s")
                state = agent.check_xfer_state(handle)
            seconds = time.perf_counter() - began
            agent.release_xfer_handle(handle)
            if state != "DONE":
                raise SystemExit(f"a read of {num_bytes} bytes ended in {state}")
            return seconds

        serve("nixl", region, source.pid, read)


if __name__ == "__main__":
    main()
