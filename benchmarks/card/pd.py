"""P and D on one device, as two processes, against one combined instance on it: the cost of the hop to a client."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import hop
from benchmarks.card.hand_off import best_transport
from benchmarks.card.model_folder import write_model
from benchmarks.card.rows import Row
from benchmarks.card.shapes import Shape
from devices.interface import Device

_POOL = {True: "64MiB", False: "8GiB"}


def measure_pd(shape: Shape, device: Device, transport: str | None, *, requests: int, tiny: bool) -> Iterator[Row]:
    """Yield the rows of each prompt length. Raises SystemExit, with a message, if a side does not start."""
    lengths = [shape.prompt_tokens] if tiny else [512, shape.prompt_tokens]
    variable = device.traits.visible_variable
    if variable is not None:
        os.environ.setdefault(variable, "0")  # every process on the same device
    with tempfile.TemporaryDirectory(prefix="card-model-") as folder:
        write_model(shape, device, Path(folder))
        flags = f"--device {device.traits.kind} --kv-cache-memory {_POOL[tiny]}"
        transport = transport or best_transport(device)
        rows = hop.main(
            ["--model", folder, "--dtype", shape.dtype, "--flags", flags, "--runs", str(requests),
             "--chunk", str(device.traits.prefill_chunk_size), "--transport", transport,
             "--prompt-tokens", *map(str, lengths)]
        )  # fmt: skip
    for row in rows:
        name = f"{shape.name} P/D on one device, {row['prompt_tokens']} tokens"
        for side in ("pd", "combined"):
            yield Row(f"{name}: first token", side, row[f"first_token_{side}_ms"], "ms")
            yield Row(f"{name}: second token", side, row[f"second_token_{side}_ms"], "ms")
        yield Row(f"{name}: hop", "pdserve", 100 * row["hop"], "% of the time to first token")
