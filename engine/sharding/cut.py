"""Cut a network for the ranks of an instance by the roles of its plan, into whole KV groups and even inner sizes.

role        | weight [out, in]           | bias     | output
column      | rows of this rank          | cut      | this rank's part
row         | columns of this rank       | rank 0's | summed over the ranks
fused       | query, key and value, or gate and up, in one weight: this rank's rows of each
heads       | rows of this rank's heads, query, key and value of each; or one number per head
experts     | gate_up [experts, 2 x inner, hidden] and down [experts, hidden, inner]: this rank's range of inner; summed
interleaved | gate_up [experts, hidden, inner x 2], down [experts, inner, hidden] and biases: the same
norm        | over all heads: the weights of this rank's heads; squares are summed
(none)      | whole on every rank; of the output layer, only rank 0, which samples, has more than a few rows

Heads follow wire/kv_layout.head_range. If ranks outnumber KV heads, these are repeated and their query heads divided.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from engine.added_biases import has_bias
from engine.checkpoints.materialise import DimensionRanges
from engine.models.sharding_roles import (
    COLUMN,
    EXPERTS,
    FUSED_GATE_UP,
    FUSED_QKV,
    HEADS,
    INTERLEAVED_EXPERTS,
    NORM_OVER_HEADS,
    ROW,
    WHOLE,
)
from engine.sharding.hooks import AllReduce, LocalConfig, NormOverRanks, SumOverRanks
from engine.sharding.plans import find_roles
from engine.sharding.shares import share_heads, share_inner
from wire.errors import ConfigError
from wire.kv_layout import Rank, ranks_holding

_UNREAD_ROWS = 16
_OF_QUERIES, _OF_KEYS = ("q_proj", "q_b_proj", "q_norm"), ("k_proj", "v_proj", "kv_b_proj", "k_norm")


def check_shards(network: Any, config: Any, num_ranks: int) -> None:
    """Raise ConfigError for a module that cannot be cut, before any rank changes or loads anything."""
    for number in range(num_ranks):
        _Sharding(network, config, Rank(number, num_ranks)).find_cuts()


def shard_network(network: Any, config: Any, rank: Rank, all_reduce: AllReduce) -> dict[str, DimensionRanges]:
    """Change a network on the meta device to one rank's; return the cuts of its tensors by name.

    `config` is the text model's. `all_reduce` is called in each forward pass, in the same order on every rank.
    """
    sharding = _Sharding(network, config, rank)
    cuts = sharding.find_cuts()
    sharding.apply(cuts, all_reduce)
    return cuts


class _Sharding:
    """One rank's view of one network."""

    def __init__(self, network: Any, config: Any, rank: Rank) -> None:
        self._network, self._rank, self._kind = network, rank, config.model_type
        self._roles = find_roles(network, config.model_type)
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or self._heads
        if any(map(_is_latent, network.modules())):  # its latents expand to keys and values for all heads
            self._kv_heads = self._heads
        self._share = share_heads(self._heads, self._kv_heads, rank)
        self._num_layers: int = config.num_hidden_layers

    def find_cuts(self) -> dict[str, DimensionRanges]:
        """Return the cuts of all tensors. Changes nothing. Raises ConfigError."""
        cuts: dict[str, DimensionRanges] = {}
        attentions = 0
        for path, module in self._network.named_modules():
            if _is_attention(module):
                attentions += 1
                cuts.update(self._cut_attention(path, module))
            elif f"{path}.gate_up_proj" in self._roles and not isinstance(module.gate_up_proj, nn.Module):
                cuts.update(self._cut_experts(path, module))
            elif path in self._roles and isinstance(module, nn.Linear) and not self._in_attention(path):
                cuts.update(self._cut_inner(path, module))
        if attentions != self._num_layers:
            raise ConfigError(
                f"{self._kind}: only {attentions} of {self._num_layers} layers have query, key and value projections "
                f"that can be split over {self._rank.of} ranks: use --tensor-parallel-size 1"
            )
        if self._rank.number > 0:
            cuts.update(self._cut_head())
        return cuts

    @torch.no_grad()
    def apply(self, cuts: dict[str, DimensionRanges], all_reduce: AllReduce) -> None:
        """Change the network according to `cuts`."""
        self._put_norms(all_reduce)
        for name, cut in cuts.items():
            path, _, last = name.rpartition(".")
            module = self._network.get_submodule(path)
            old = getattr(module, last)
            new = torch.empty(cut.shape(tuple(old.shape)), dtype=old.dtype, device=old.device)
            setattr(module, last, nn.Parameter(new, requires_grad=False))
        for path, role in self._roles.items():
            module = self._find(path)
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
                if role == ROW and module.bias is not None and self._rank.number > 0:
                    module.register_parameter("bias", None)
            if isinstance(module, nn.Module) and role in (ROW, EXPERTS):
                module.register_forward_hook(SumOverRanks(all_reduce))
        for _, module in self._network.named_modules():
            if _is_attention(module):
                self._set_head_counts(module)
        head = self._network.get_output_embeddings()
        if isinstance(head, nn.Linear):
            head.out_features = len(head.weight)

    def _cut_attention(self, path: str, module: Any) -> Iterator[tuple[str, DimensionRanges]]:
        own = {f"{path}.{name}" for name, _ in module.named_children()} | {
            f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)
        }
        for name in sorted(own):
            if name in self._roles:
                yield from self._cut_projection(name, self._find(name))
            elif _num_elements(self._find(name)) > _head_dim(module):
                raise ConfigError(self._no_role(name))

    def _cut_projection(self, name: str, module: Any) -> Iterator[tuple[str, DimensionRanges]]:
        role, last = self._roles[name], name.rpartition(".")[2]
        if role in WHOLE:
            return
        if role == FUSED_QKV:
            yield from self._cut_fused_qkv(name, module)
            return
        of_queries = role in (ROW, HEADS) or last in _OF_QUERIES
        if not (of_queries or last in _OF_KEYS) or (last == "query_key_value" and self._kv_heads != self._heads):
            raise ConfigError(self._no_role(name))
        count, held = (self._heads, self._share.query) if of_queries else (self._kv_heads, self._share.kv)
        size = self._size(name, module)
        if size % count:
            raise ConfigError(f"{name}: a size of {size} does not divide into {count} heads, so it cannot be cut")
        taken = (held.start * (size // count), held.end * (size // count))
        if isinstance(module, nn.Linear):
            yield from _cut_linear(name, module, role, taken)
        else:
            yield (name if isinstance(module, nn.Parameter) else f"{name}.weight"), DimensionRanges(0, (taken,))
            if has_bias(module):
                yield f"{name}.bias", DimensionRanges(0, (taken,))

    def _size(self, name: str, module: Any) -> int:
        """Return the size that the heads divide. Raises ConfigError for a module that does not match its role."""
        role = self._roles[name]
        if isinstance(module, nn.Linear) and role in (COLUMN, ROW, HEADS):
            return module.in_features if role == ROW else module.out_features
        if isinstance(module, nn.Parameter) and role == HEADS:
            return len(module)
        if role == NORM_OVER_HEADS and hasattr(module, "variance_epsilon"):
            return len(module.weight)
        raise ConfigError(self._no_role(name))

    def _cut_fused_qkv(self, name: str, module: nn.Linear) -> Iterator[tuple[str, DimensionRanges]]:
        count = self._heads + 2 * self._kv_heads
        if module.out_features % count:
            raise ConfigError(f"{name}: a size of {module.out_features} does not divide into {count} heads")
        dim, (query, kv) = module.out_features // count, (self._share.query, self._share.kv)
        ranges = [(query.start * dim, query.end * dim)]
        for first in (self._heads, self._heads + self._kv_heads):  # keys, then values
            ranges.append(((first + kv.start) * dim, (first + kv.end) * dim))
        yield from _cut_linear(name, module, COLUMN, *ranges)

    def _cut_inner(self, name: str, module: nn.Linear) -> Iterator[tuple[str, DimensionRanges]]:
        role = self._roles[name]
        if role not in WHOLE and module is not self._network.get_output_embeddings():
            size = module.in_features if role == ROW else module.out_features
            if role == FUSED_GATE_UP:
                start, end = share_inner(name, size // 2, self._rank)
                yield from _cut_linear(name, module, role, (start, end), (size // 2 + start, size // 2 + end))
            else:
                yield from _cut_linear(name, module, role, share_inner(name, size, self._rank))

    def _cut_experts(self, path: str, module: Any) -> Iterator[tuple[str, DimensionRanges]]:
        gate_up, down = module.gate_up_proj, module.down_proj
        interleaved = self._roles[f"{path}.gate_up_proj"] == INTERLEAVED_EXPERTS
        known = {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if interleaved else set())
        others = [name for name, _ in module.named_parameters() if name not in known]
        along = 1 if interleaved else 2  # the inner dimension of down
        inner = down.shape[along]
        if others or gate_up.shape[3 - along] != 2 * inner or self._roles.get(path) != EXPERTS:
            raise ConfigError(self._no_role(f"{path}.{[*others, 'gate_up_proj'][0]}"))
        start, end = share_inner(path, inner, self._rank)
        yield f"{path}.down_proj", DimensionRanges(along, ((start, end),))
        if not interleaved:
            yield f"{path}.gate_up_proj", DimensionRanges(1, ((start, end), (inner + start, inner + end)))
            return
        yield f"{path}.gate_up_proj", DimensionRanges(2, ((2 * start, 2 * end),))
        yield f"{path}.gate_up_proj_bias", DimensionRanges(1, ((2 * start, 2 * end),))
        if self._rank.number > 0:  # only rank 0 adds it
            yield f"{path}.down_proj_bias", DimensionRanges(0, (), is_zero=True)

    def _cut_head(self) -> Iterator[tuple[str, DimensionRanges]]:
        """Cut the output layer to its first rows, unless it shares the embedding: this rank's logits are not read."""
        head, embeddings = self._network.get_output_embeddings(), self._network.get_input_embeddings()
        if not isinstance(head, nn.Linear) or head.weight is embeddings.weight:
            return
        (name,) = (name for name, module in self._network.named_modules() if module is head)
        rows = (0, min(_UNREAD_ROWS, head.out_features))
        yield f"{name}.weight", DimensionRanges(0, (rows,))
        if head.bias is not None:
            yield f"{name}.bias", DimensionRanges(0, (rows,))

    def _set_head_counts(self, module: Any) -> None:
        """Set the head counts that some modules store and use to shape their heads."""
        query, kv = (held.end - held.start for held in (self._share.query, self._share.kv))
        for name, value in (
            ("num_heads", query), ("num_attention_heads", query), ("num_key_value_heads", kv),
            ("num_key_value_groups", query // kv),
        ):  # fmt: skip
            if hasattr(module, name):
                setattr(module, name, value)
        if hasattr(module, "qkv_proj"):  # it slices its query by the config's number of heads
            module.config = LocalConfig(module.config, {"num_attention_heads": query, "num_key_value_heads": kv})

    def _put_norms(self, all_reduce: AllReduce) -> None:
        """Replace norms over all heads by norms that sum over the ranks; keys repeated on several ranks count once."""
        for name, role in self._roles.items():
            if role == NORM_OVER_HEADS:
                path, _, last = name.rpartition(".")
                sharers = ranks_holding(self._share.kv.start, self._kv_heads, self._rank.of)
                holders = len(sharers) if last in _OF_KEYS else 1
                norm = NormOverRanks(self._find(name), holders=holders, all_reduce=all_reduce)
                setattr(self._network.get_submodule(path), last, norm)

    def _in_attention(self, path: str) -> bool:
        return _is_attention(self._network.get_submodule(path.rpartition(".")[0]))

    def _find(self, path: str) -> Any:
        parent, _, last = path.rpartition(".")
        return getattr(self._network.get_submodule(parent), last)

    def _no_role(self, name: str) -> str:
        role = self._roles.get(name)
        what = f"is {role} there" if role else "is not in it"
        return (
            f"{self._kind} cannot be split over {self._rank.of} ranks by its tensor-parallel plan: {name} {what}; "
            "use --tensor-parallel-size 1"
        )


def _cut_linear(
    name: str, module: nn.Linear, role: str, *taken: tuple[int, int]
) -> Iterator[tuple[str, DimensionRanges]]:
    yield f"{name}.weight", DimensionRanges(1 if role == ROW else 0, taken)
    if module.bias is not None and role != ROW:
        yield f"{name}.bias", DimensionRanges(0, taken)


def _is_attention(module: Any) -> bool:
    fused = any(_has_linears(module, name) for name in ("qkv_proj", "query_key_value"))
    return fused or _is_latent(module) or _has_linears(module, "q_proj", "k_proj", "v_proj")


def _is_latent(module: Any) -> bool:
    return _has_linears(module, "kv_a_proj_with_mqa", "kv_b_proj")


def _has_linears(module: Any, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def _head_dim(module: Any) -> int:
    return int(next((getattr(module, name) for name in ("head_dim", "head_size") if hasattr(module, name)), 0))


def _num_elements(found: Any) -> int:
    tensors = [found] if isinstance(found, torch.Tensor) else [*found.parameters()]
    return sum(tensor.numel() for tensor in tensors)
