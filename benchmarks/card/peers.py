"""Peers of our engine: vLLM if it can be imported, else transformers with torch's eager and SDPA attention."""

import gc
import importlib
import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig

from benchmarks.card.limits import Limits
from benchmarks.card.model import make_network
from benchmarks.card.rows import Row, seconds_of
from benchmarks.card.shapes import Shape
from benchmarks.card.steps import decode_row, prefill_row
from devices.interface import Device


def measure_peers(shape: Shape, device: Device, limits: Limits, *, rounds: int) -> Iterator[Row]:
    """Yield the rows of the installed peers."""
    if importlib.util.find_spec("vllm") is not None and not device.traits.pools_on_host:
        yield from _measure_vllm(shape, limits, rounds)
        return
    yield Row(f"{shape.name}, every measure", "vLLM", note="not installed")
    for attention in ("eager", "sdpa"):
        yield from _measure_transformers(shape, device, limits, rounds, attention)


@torch.inference_mode()
def _measure_transformers(
    shape: Shape, device: Device, limits: Limits, rounds: int, attention: str
) -> Iterator[Row]:  # fmt: skip
    network: Any = make_network(shape, device, attention)
    who = f"transformers, {attention}"
    ids = torch.full((shape.prompts, shape.prompt_tokens), 7, device=device.torch_device)

    def prefill() -> None:
        network(input_ids=ids, use_cache=False, logits_to_keep=1).logits.argmax(-1).tolist()

    yield prefill_row(shape, who, seconds_of(prefill, device.synchronize, rounds), limits, None, "")
    for batch in shape.batches:
        cache = DynamicCache(config=network.config)
        past = torch.full((batch, shape.context), 7, device=device.torch_device)
        network(input_ids=past, past_key_values=cache, logits_to_keep=1)

        def decode(cache: DynamicCache = cache, last: torch.Tensor = past[:, :1]) -> None:
            network(input_ids=last, past_key_values=cache).logits.argmax(-1).tolist()

        seconds = seconds_of(decode, device.synchronize, rounds)
        yield decode_row(shape, who, seconds, batch, limits, None, "the context grows by one token per round")
        del cache
        gc.collect()


def _measure_vllm(shape: Shape, limits: Limits, rounds: int) -> Iterator[Row]:
    """Yield vLLM's rows, from its LLM class with dummy weights; a decode step is the time per token after the first."""
    vllm: Any = importlib.import_module("vllm")

    note = f"vLLM {importlib.metadata.version('vllm')}, whole requests"
    with tempfile.TemporaryDirectory(prefix="card-vllm-") as folder:
        config = {**LlamaConfig(**shape.config()).to_dict(), "architectures": ["LlamaForCausalLM"]}
        Path(folder, "config.json").write_text(json.dumps({**config, "torch_dtype": shape.dtype}))
        engine = vllm.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype=shape.dtype,
            enable_prefix_caching=False, gpu_memory_utilization=0.8, max_num_batched_tokens=16_384,
        )  # fmt: skip

        def run(count: int, length: int, num_tokens: int) -> float:
            prompts = [{"prompt_token_ids": [7 + row] * length} for row in range(count)]
            params = vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            began = perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            return perf_counter() - began

        run(1, shape.context, 8)
        prefill_s = min(run(shape.prompts, shape.prompt_tokens, 1) for _ in range(rounds))
        yield prefill_row(shape, "vLLM", prefill_s, limits, None, note)
        for batch in shape.batches:
            first = min(run(batch, shape.context, 1) for _ in range(rounds))
            many = min(run(batch, shape.context, 65) for _ in range(rounds))
            yield decode_row(shape, "vLLM", (many - first) / 64, batch, limits, None, note)
