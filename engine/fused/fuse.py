"""Replace a network of the Llama family by native kernels with its weights; unsupported networks are not replaced.

check the family -> pack a layer -> compare it with the original on random rows -> free the original -> next layer

If a layer differs, the freed layers get their weights back from the packed ones, and the network is not replaced.
Networks that are not replaced get the faster layout of engine/linear_layout.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.added_biases import has_bias
from engine.checkpoints.dtypes import read_cpu_flags
from engine.fused.area import Area, SharedWeights
from engine.fused.check import Disagreement, LayerCheck
from engine.fused.decoder import FusedWeights
from engine.fused.kernels import Kernels
from engine.fused.memory import RowSizes
from engine.fused.structs import (
    FORMATS,
    PANEL,
    DecoderStruct,
    FinishCode,
    LayerStruct,
    Linear,
    address,
    declare,
    padded,
)
from engine.fused.weights import PackedMemory, free, num_panels, packed_bytes
from engine.linear_layout import lay_out
from engine.models.families import FAMILIES, support_of
from engine.quantization.kept import KeptLinear
from engine.rope_table import RopeTable
from native.engine_library import Threads
from telemetry.logs import EventLogger

_LAYERS = frozenset(family.fused_layer for family in FAMILIES if family.fused_layer)
_NATIVE_FLAGS = frozenset({"avx2", "fma"})  # required by the lowest level of native/isa.h above plain
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})  # those whose angles depend only on the position

_log = EventLogger("engine")


def fuse(network: Any, *, threads: Threads | None, shared: SharedWeights | None = None) -> FusedWeights | None:
    """Return the weights for a FusedDecoder, and free those of `network`; None if the network is not replaced.

    `threads` run the kernels and stay open; None if there are no kernels. Packed weights are read from `shared`, or
    written to it.
    """
    report, reason = _log.info, why_not(network)
    if reason is None and (threads is None or threads.isa == "plain"):
        reason = "there are no native kernels"  # plain C is no faster than torch
    if reason is None and threads is not None:
        try:
            with _one_thread():  # torch's tensors are small here, and its threads are slow to start
                return _publish(_Fusion(network, threads, shared))
        except Disagreement as error:
            report, reason = _log.warning, str(error)
    report("not_fused", model=type(network).__name__, layers="transformers", reason=reason)
    lay_out(network)
    return None


def will_fuse(config: Any, kernels: Kernels) -> bool:
    """Return, before weights are read, whether `fuse` will succeed: now, or at the next start with built kernels.

    Both starts must choose the same dtype: an instance that starts later must be able to read this one's KV.
    """
    if support_of(config.model_type).fused_layer is None:
        return False
    if kernels.threads is None:
        return kernels.is_awaited and read_cpu_flags() >= _NATIVE_FLAGS
    return kernels.threads.isa != "plain"


def why_not(network: Any) -> str | None:
    """Return why a network is not supported, as text for the log; None if it is supported."""
    layers = getattr(getattr(network, "model", None), "layers", None)
    if not layers or not hasattr(network, "lm_head"):
        return "it lacks `model.layers` or `lm_head`, which Llama has"
    kinds = {type(layer).__name__ for layer in layers}
    if not kinds <= _LAYERS:
        return f"its layers are {', '.join(sorted(kinds))}"
    config = network.config
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if config.rope_parameters.get("rope_type", "default") not in _ROPE_TYPES:
        return f"its rope type is {config.rope_parameters.get('rope_type')}"
    if any(has_bias(module) for module in network.modules() if not isinstance(module, nn.Linear)):
        return "its norms add biases"  # a small bias would pass its layer's check
    return _why_not_shapes(network)


def _why_not_shapes(network: Any) -> str | None:
    if any(isinstance(module, KeptLinear) for module in network.modules()):
        return "its linear layers stay quantised"
    linears = [module for module in network.modules() if isinstance(module, nn.Linear)]
    dtypes = {linear.weight.dtype for linear in linears}
    if len(dtypes) != 1 or not dtypes <= set(FORMATS):
        return f"its dtypes are {', '.join(sorted(map(str, dtypes)))}"
    if any(type(linear) is not nn.Linear or linear.weight.device.type != "cpu" for linear in linears):
        return "its linear layers are not plain ones on CPU"
    head_dim = network.model.layers[0].self_attn.head_dim
    if head_dim % PANEL:
        return f"its head dim is {head_dim}, but must be a multiple of {PANEL}"
    if any(linear.in_features % 2 for linear in linears):
        return "the number of inputs of a linear layer is odd"
    return None


@dataclass(frozen=True, slots=True)
class _Parts:
    """The linear layers of one decoder layer, grouped as they are packed."""

    qkv: tuple[nn.Linear, ...]
    out: nn.Linear
    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear

    def all(self) -> tuple[tuple[nn.Linear, ...], ...]:
        return self.qkv, (self.out,), self.gate_up, (self.down,)


class _Fusion:
    """The replacement of one network."""

    def __init__(self, network: Any, threads: Threads, shared: SharedWeights | None) -> None:
        self._network, self._threads = network, threads
        self._functions = declare(threads.library)
        self._parts = [_layer_parts(layer) for layer in network.model.layers]
        num_bytes = sum(packed_bytes(joined) for parts in self._parts for joined in parts.all())
        self._memory = PackedMemory(num_bytes + packed_bytes([network.lm_head]), self._functions, threads, shared)
        self._tied = network.lm_head.weight is network.model.embed_tokens.weight
        self._layers = (LayerStruct * len(self._parts))()

    @property
    def area(self) -> Area:
        """The memory of the packed weights."""
        return self._memory.area

    @torch.inference_mode()
    def weights(self) -> FusedWeights:
        """Pack, check and free, layer by layer."""
        model, dtype = self._network.model, self._network.lm_head.weight.dtype
        weights = FusedWeights(
            layers=self._layers, decoder=self._decoder(), options=[], sizes=self._row_sizes(), dtype=dtype,
            vocab_size=self._network.lm_head.out_features,
            embedding=None if self._tied else model.embed_tokens.weight.detach(),
            rope=RopeTable(model.rotary_emb, dtype), memory=self._memory, functions=self._functions,
            threads=self._threads,
        )  # fmt: skip
        freed: list[int] = []
        try:
            self._replace(weights, freed)
        except Disagreement:
            for index in freed:
                self._restore(index)
            raise
        return weights

    def _replace(self, weights: FusedWeights, freed: list[int]) -> None:
        """Pack, check and free all layers, then the output layer; append each freed layer to `freed`."""
        model, check = self._network.model, LayerCheck(self._network, weights)
        for index, layer in enumerate(model.layers):
            self._pack_layer(index, layer)
            check.layer(index)
            freed.append(index)
            for joined in self._parts[index].all():
                for linear in joined:
                    free(linear)
        weights.decoder.head = self._memory.pack([self._network.lm_head], FinishCode.STORE)
        check.head()
        free(self._network.lm_head)
        if self._tied:
            free(model.embed_tokens)

    def _restore(self, index: int) -> None:
        native = self._layers[index]
        products = native.qkv, native.out, native.gate_up, native.down
        for product, joined in zip(products, self._parts[index].all(), strict=True):
            self._memory.unpack(product, joined)

    def _pack_layer(self, index: int, layer: Any) -> None:
        parts, memory, native = self._parts[index], self._memory, self._layers[index]
        native.qkv = memory.pack(parts.qkv, FinishCode.STORE)
        native.out = memory.pack([parts.out], FinishCode.ADD)
        native.gate_up = memory.pack(parts.gate_up, FinishCode.GATED_SILU)
        native.down = memory.pack([parts.down], FinishCode.ADD)
        native.input_norm = memory.keep(layer.input_layernorm.weight)
        native.post_norm = memory.keep(layer.post_attention_layernorm.weight)
        attention = layer.self_attn
        if hasattr(attention, "q_norm"):
            native.query_norm, native.key_norm = (memory.keep(n.weight) for n in (attention.q_norm, attention.k_norm))

    def _decoder(self) -> DecoderStruct:
        """Return the sizes. Heads and columns are counted from the weights, because a rank has only a part of them."""
        model, attention, parts = self._network.model, self._network.model.layers[0].self_attn, self._parts[0]
        query, key, _ = (linear.out_features for linear in parts.qkv)
        key_column = padded(query, PANEL)
        return DecoderStruct(
            layers=address(self._layers), final_norm=self._memory.keep(model.norm.weight), head=Linear(),
            num_layers=len(self._parts), hidden=parts.qkv[0].in_features, num_heads=query // attention.head_dim,
            num_kv_heads=key // attention.head_dim, head_dim=attention.head_dim, key_column=key_column,
            value_column=key_column + padded(key, PANEL),
            rounded=int(self._network.lm_head.weight.dtype != torch.float32), epsilon=model.norm.variance_epsilon,
        )  # fmt: skip

    def _row_sizes(self) -> RowSizes:
        parts = self._parts[0]
        return RowSizes(
            hidden=parts.qkv[0].in_features,
            qkv=sum(num_panels(linear.out_features) for linear in parts.qkv) * PANEL,
            attended=parts.out.in_features,
            inner=max(one.down.in_features for one in self._parts),
            logits=self._network.lm_head.out_features,
        )


def _publish(fusion: _Fusion) -> FusedWeights:
    """Return the weights; share them with other processes once every layer has been checked."""
    area = fusion.area
    try:
        weights = fusion.weights()
        area.publish()
    finally:
        area.release()
    return weights


def _layer_parts(layer: Any) -> _Parts:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Parts(qkv, attention.o_proj, (mlp.gate_proj, mlp.up_proj), mlp.down_proj)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
