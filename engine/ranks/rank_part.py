"""One rank's part of a model: its slices of the weights, and the model with these weights and its pool."""

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from devices.collectives import collective_named
from devices.interface import Device, Memory
from devices.table import open_device
from engine.attention.backend_choice import trusted
from engine.attention.backends import make_backend
from engine.attention.interface import AttentionBackend
from engine.attention.registered import register
from engine.decode_graphs import graph_rows
from engine.device_modules import find_nucleus, replace_modules
from engine.fused.decoder import FusedWeights
from engine.fused.fuse import fuse
from engine.fused.kernels import NO_KERNELS, find_kernels
from engine.interface import EngineInfo
from engine.kv_probe import find_kv_tensors
from engine.model_folder import ModelFolder, open_folder, read_network
from engine.ranks.marks import Marks
from engine.ranks.reduce import Reduce
from engine.ranks.setup import RankLoaded, RankSetup
from engine.ranks.stream_sum import StreamSum
from engine.ranks.sums import GroupSum, SharedSum, collective_for_ranks, join_group
from engine.rope import StepRope, rotate_by_sequence
from engine.sampling.sampler import Nucleus
from engine.sharding.cut import shard_network
from engine.sharding.hooks import num_reductions
from engine.torch_model import TorchModel
from native.ranks import RanksLibrary
from native.ranks import load as load_sum
from wire.description import ModelIdentity
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout, head_range

SHARED = "shared"
"""The name of the sum in shared memory; other names are those of process groups: engine/ranks/sums.py."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank's network with its weights.

    `fused` are the weights in the form of the native kernels, where these run it. All tensors are on `device`.
    """

    setup: RankSetup
    device: Device
    folder: ModelFolder
    network: Any
    fused: FusedWeights | None
    backend: AttentionBackend
    rope: StepRope | None
    nucleus: Nucleus | None
    reduce: Reduce
    library: RanksLibrary | None
    loaded: RankLoaded
    notes: tuple[str, ...]

    def check_held(self, whole: tuple[KvTensor, ...]) -> None:
        """Raise ConfigError unless this rank's layers make the KV heads of `whole` that are assigned to it."""
        for held, tensor in zip(self.loaded.tensors, whole, strict=True):
            start, end = head_range(tensor.heads, self.setup.rank)
            if held.heads != end - start:
                raise ConfigError(
                    f"{self.folder.path}: {self.setup.rank} makes {held.heads} heads of KV tensor {tensor.name} of "
                    f"layer {tensor.layer}, but must hold {end - start} of {tensor.heads}: use --tensor-parallel-size 1"
                )

    def connect(self, way: str, store_fd: int, marks: Marks) -> None:
        """Connect to the other ranks, which all sum in the same way. Raises ReduceFailed."""
        rank, step_s = self.setup.rank, self.setup.step_s
        if way == SHARED and self.library is not None:
            self.reduce.connect(SharedSum(self.library, rank, marks, step_s))
            return
        collective = collective_named(way)
        if collective.on_host:
            self.reduce.connect(GroupSum(join_group(collective, store_fd, rank), rank, marks, step_s))
        else:
            self.reduce.connect(StreamSum(collective, store_fd, rank, marks, step_s, self.device))

    def make_model(self, info: EngineInfo, pool: Memory, graph_rows: int = 0) -> TorchModel:
        """Return the model of this rank with its pool, which has spare blocks for graphs of up to `graph_rows` rows."""
        return TorchModel(
            self.network, info=info, memory=pool, backend=self.backend,
            keeps_logits=self.folder.checkpoint.keeps_logits, rope=self.rope,
            fused=self.fused, reduce=self.reduce, device=self.device, step_s=self.setup.step_s,
            nucleus=self.nucleus, graph_rows=graph_rows,
        )  # fmt: skip


def load_part(setup: RankSetup, reduce: Reduce) -> RankPart:
    """Read this rank's slices, onto its device. Sets torch's thread count for the whole process. Raises ConfigError."""
    began = time.monotonic()
    torch.set_num_threads(setup.num_threads)
    register()
    device = open_device(setup.device)
    device.activate()
    on_host = device.traits.pools_on_host
    folder = open_folder(Path(setup.path), setup.quantization)
    checkpoint = folder.checkpoint
    shard = functools.partial(
        shard_network, config=checkpoint.text_config, rank=setup.rank, all_reduce=reduce
    )  # fmt: skip
    read = read_network(folder, setup.dtype, shard, device.torch_device, device.traits.kept_linears)
    network = read.loaded.network
    held = find_kv_tensors(network, checkpoint, setup.dtype)
    reduce.sums_per_pass = num_reductions(network)
    weight_bytes = sum(tensor.nbytes for tensor in {id(p): p for p in network.parameters()}.values()) + read.kept_bytes
    kernels = find_kernels(setup.num_threads) if on_host and setup.is_native else NO_KERNELS
    fused = fuse(network, threads=kernels.threads) if on_host else None
    notes = (*read.notes, *replace_modules(network, device))
    backend, warning = trusted(
        make_backend(setup.attention_backend, device, kernels.threads), network, device,
        block_size=setup.block_size, dtype=getattr(torch, setup.dtype),
    )  # fmt: skip
    nucleus = find_nucleus(device, checkpoint.text_config.vocab_size)
    library = load_sum() if on_host else None
    rope = rotate_by_sequence(network)
    sums_stay = not collective_for_ranks(setup.device).on_host  # on the stream, where a graph can contain them
    loaded = RankLoaded(
        held, fused is not None, library is not None, weight_bytes, read.bytes_read, time.monotonic() - began,
        kept=read.kept, graph_rows=graph_rows(setup.max_graph_rows, device, backend, rope) if sums_stay else 0,
    )  # fmt: skip
    all_notes = (getattr(backend, "note", None), warning, *notes)
    return RankPart(
        setup, device, folder, network, fused, backend, rope, nucleus, reduce, library, loaded,
        tuple(note for note in all_notes if note),
    )  # fmt: skip


def part_info(part: RankPart, layout: PoolLayout) -> EngineInfo:
    """Return the info of a rank that only computes; it is not served to clients."""
    setup, text = part.setup, part.folder.checkpoint.text_config
    return EngineInfo(
        model=ModelIdentity(setup.path, "", ""), max_model_len=setup.max_model_len, vocab_size=text.vocab_size,
        dtype=setup.dtype, device=part.device.name, layout=layout, eos_token_ids=(),
    )  # fmt: skip
