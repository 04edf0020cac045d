"""The reference: one thread copies the same number of bytes between two pools, each a sealed, touched memfd."""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kv.control import serve_stdin
from benchmarks.kv.pool import fill, touched_pool
from wire.kv_layout import KvTensor, PoolLayout


def main() -> None:
    """Copy as many bytes as each command says; the argument is the size of the largest copy."""
    num_bytes = int(sys.argv[1])
    layout = PoolLayout([KvTensor(0, "k", 1, 2048, "bfloat16")], num_blocks=-(-num_bytes // 65536), block_size=16)
    source, target = touched_pool(layout), touched_pool(layout)
    fill(source, 1)

    def copy(command: dict[str, Any]) -> dict[str, Any]:
        size = int(command["bytes"])
        began = time.perf_counter()
        target.buffer[:size] = source.buffer[:size]
        seconds = time.perf_counter() - began
        verified = target.buffer[:size] == source.buffer[:size] if command.get("verify") else None
        return {"seconds": seconds, "verified": verified}

    serve_stdin(copy)


if __name__ == "__main__":
    main()
