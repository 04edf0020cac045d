"""Our engine's model of a shape, with random weights made on the device: no folder is written or read."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.card.shapes import Shape
from devices.interface import Device
from engine.attention.backends import make_backend
from engine.attention.registered import NAME, register
from engine.decode_graphs import graph_rows, num_spare_blocks
from engine.device_modules import replace_modules
from engine.interface import EngineInfo
from engine.torch_model import TorchModel
from wire.description import ModelIdentity
from wire.kv_layout import KvTensor, PoolLayout


def make_network(shape: Shape, device: Device, attention: str) -> torch.nn.Module:
    """Return the network of transformers; `attention` is its implementation's name."""
    with torch.device(device.torch_device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network: torch.nn.Module = AutoModelForCausalLM.from_config(
            LlamaConfig(**shape.config()), dtype=getattr(torch, shape.dtype), attn_implementation=attention
        )
    return network.eval()


def make_model(shape: Shape, device: Device, *, most_rows: int) -> tuple[TorchModel, str]:
    """Return the model with a pool for its steps, and a note on its attention.

    Graphs are captured for steps of up to `most_rows` sequences, none if it is 0.
    """
    register()
    backend = make_backend("auto", device)
    block_size = device.traits.block_size
    tensors = [
        KvTensor(layer, side, shape.num_kv_heads, shape.head_dim, shape.dtype)
        for layer in range(shape.num_layers) for side in ("k", "v")
    ]  # fmt: skip
    longest = max(2 * shape.context, shape.prompt_tokens)
    sequences = max(*shape.batches, shape.prompts)
    num_blocks = sequences * -(-longest // block_size)
    rows = graph_rows(most_rows, device, backend, None)
    info = EngineInfo(
        ModelIdentity(shape.name, "0" * 16, "0" * 16), longest, shape.vocab_size, shape.dtype, device.name,
        PoolLayout(tensors, num_blocks=num_blocks, block_size=block_size), (),
    )  # fmt: skip
    spare = num_spare_blocks(rows, block_size)
    memory = device.make_pool(PoolLayout(tensors, num_blocks=num_blocks + spare, block_size=block_size))
    network = make_network(shape, device, NAME)
    lines = replace_modules(network, device)
    model = TorchModel(
        network, info=info, memory=memory, backend=backend, keeps_logits=True,
        device=device, graph_rows=rows,
    )  # fmt: skip
    for pool in model._pools:  # a new pool's memory may contain NaN
        pool.keys.zero_()
        pool.values.zero_()
    model.capture_graphs()
    note = str(getattr(backend, "note", type(backend).__name__))
    return model, "; ".join((note, *lines, "graphs" if rows else "no graphs"))
