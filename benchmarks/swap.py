"""How long preempting and restoring one sequence stops the engine: `python -P benchmarks/swap.py`.

Blocks of SmolLM2-135M in bf16 (30 layers, K and V of 3 heads of 64, 16 tokens), once adjacent and once scattered.
"""

import argparse
import random
import time

from devices.host_pool import HostPool
from engine.kv.block_store import BlockStore
from native.move_library import load
from wire.kv_layout import KvTensor, PoolLayout

TENSORS = tuple(KvTensor(layer, name, 3, 64, "bfloat16") for layer in range(30) for name in ("k", "v"))


def main() -> None:
    """Print milliseconds: the first time, in which the swap area's memory is allocated, and the best of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    num_blocks = -(-args.tokens // 16)
    layout = PoolLayout(TENSORS, num_blocks=4 * num_blocks, block_size=16)
    orders = {"neighbours": list(range(num_blocks))}
    orders["scattered"] = random.Random(1).sample(range(layout.num_blocks), num_blocks)
    with HostPool(layout) as pool:
        pool.buffer[:] = bytes(layout.total_bytes)
        for blocks, block_ids in orders.items():
            for copier, make in (("python", lambda: None), ("native", load)):
                store, slots = BlockStore(pool, make), list(range(num_blocks))
                saves, loads = [], []
                for _ in range(args.rounds):
                    started = time.perf_counter()
                    store.save(block_ids, slots)
                    saved = time.perf_counter()
                    store.load(slots, block_ids)
                    saves.append(1000 * (saved - started))
                    loads.append(1000 * (time.perf_counter() - saved))
                print(
                    f"{args.tokens} tokens, {num_blocks * 16 * layout.token_bytes >> 20} MiB, {blocks}, {copier}: "
                    f"save {saves[0]:.0f} ms first, then {min(saves[1:]):.0f}; load {min(loads):.0f}"
                )


if __name__ == "__main__":
    main()
