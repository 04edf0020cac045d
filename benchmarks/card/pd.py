"""P and D on one device, as two processes, against one combined instance on it: the cost of the hop to a client."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks import hop
from benchmarks.card.model import make_network
from benchmarks.card.rows import Row
from benchmarks.card.shapes import Shape
from devices.interface import Device

_POOL = {True: "64MiB", False: "8GiB"}


def measure_pd(shape: Shape, device: Device, *, requests: int, tiny: bool) -> Iterator[Row]:
    """Yield the rows of each prompt length. Raises SystemExit, with a message, if a side does not start."""
    lengths = [shape.prompt_tokens] if tiny else [512, shape.prompt_tokens]
    variable = device.traits.visible_variable
    if variable is not None:
        os.environ.setdefault(variable, "0")  # every process on the same device
    with tempfile.TemporaryDirectory(prefix="card-model-") as folder:
        write_model(shape, device, Path(folder))
        flags = f"--device {device.traits.kind} --kv-cache-memory {_POOL[tiny]}"
        transport = [] if device.traits.pools_on_host else ["--transport", "cuda_ipc"]
        rows = hop.main(
            ["--model", folder, "--dtype", shape.dtype, "--flags", flags, "--runs", str(requests),
             "--chunk", str(device.traits.prefill_chunk_size), *transport, "--prompt-tokens", *map(str, lengths)]
        )  # fmt: skip
    for row in rows:
        name = f"{shape.name} P/D on one device, {row['prompt_tokens']} tokens"
        for side in ("pd", "combined"):
            yield Row(f"{name}: first token", side, row[f"first_token_{side}_ms"], "ms")
            yield Row(f"{name}: second token", side, row[f"second_token_{side}_ms"], "ms")
        yield Row(f"{name}: hop", "pdserve", 100 * row["hop"], "% of the time to first token")


def write_model(shape: Shape, device: Device, folder: Path) -> None:
    """Write the shape's weights and a tokenizer with one word for each id."""
    make_network(shape, device, "sdpa").save_pretrained(folder)  # type: ignore[operator]
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(shape.vocab_size)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
