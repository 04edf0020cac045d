"""P and D against one combined instance: what the hop costs a client, and what arriving KV costs the streams on D."""

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


def measure_pd(
    shape: Shape, device: Device, transport: str | None, *, ranks: int, requests: int, tiny: bool
) -> Iterator[Row]:  # fmt: skip
    """Yield the rows of each prompt length. Raises SystemExit, with a message, if a side does not start."""
    lengths = [shape.prompt_tokens] if tiny else [512, shape.prompt_tokens]
    variable = device.traits.visible_variable
    if variable is not None:
        os.environ.setdefault(variable, ",".join(map(str, range(ranks))))  # every instance on the same devices
    with tempfile.TemporaryDirectory(prefix="card-model-") as folder:
        write_model(shape, device, Path(folder))
        flags = f"--device {device.traits.kind} --kv-cache-memory {_POOL[tiny]} --tensor-parallel-size {ranks}"
        transport = transport or best_transport(device)
        rows = hop.main(
            ["--model", folder, "--dtype", shape.dtype, "--flags", flags, "--runs", str(requests),
             "--chunk", str(device.traits.prefill_chunk_size), "--transport", transport,
             "--stream-tokens", "64" if tiny else "512", "--prompt-tokens", *map(str, lengths)]
        )  # fmt: skip
    for row in rows:
        name = f"{shape.name} P/D, TP {ranks}, {row['prompt_tokens']} tokens"
        for side in ("pd", "combined"):
            yield Row(f"{name}: first token", side, row[f"first_token_{side}_ms"], "ms")
            yield Row(f"{name}: second token", side, row[f"second_token_{side}_ms"], "ms")
        yield Row(f"{name}: hop", "pdserve", 100 * row["hop"], "% of the time to first token")
        for percent in (50, 99):
            alone, under_way = (row[f"token_gap_p{percent}_{when}_ms"] for when in ("alone", "kv"))
            gap = f"{name}: token gap p{percent} of {hop.STREAMS} streams"
            yield Row(f"{gap}, alone", "pd", alone, "ms")
            yield Row(f"{gap}, while KV arrives", "pd", under_way, "ms", alone, "alone")
        handed = row["handed_bytes"] / 1e6 or None
        yield Row(
            f"{name}: KV handed off meanwhile", "pd", handed, "MB", note="" if handed else "no prompt was handed off"
        )
