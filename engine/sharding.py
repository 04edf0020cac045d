"""How a network is cut for the ranks of an instance: roles from its own plan, whole KV groups, even inner sizes.

role        | weight [out, in]           | bias     | output
column      | rows of this rank          | cut      | this rank's part
row         | columns of this rank       | rank 0's | summed over the ranks
fused       | query, key and value, or gate and up, in one weight: this rank's rows of each
experts     | gate_up [experts, 2 x inner, hidden] and down [experts, hidden, inner]: the inner part; output summed
(none)      | whole on every rank; of the output layer all but rank 0, which samples, have a few rows or the embedding

Heads follow wire/kv_layout.head_range. More ranks than KV heads repeat these and deal out their query heads.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from engine.materialise import Cut
from engine.shares import share_heads, share_inner
from wire.errors import ConfigError
from wire.kv_layout import Rank

AllReduce = Callable[[torch.Tensor], None]
"""Sums a tensor over all ranks, in place."""

_FUSED_QKV, _FUSED_GATE_UP = "fused_qkv", "fused_gate_up"
_WHOLE = ("replicated_with_grad_allreduce", "replicate", "embedding_rowwise", "embedding_colwise")
_UNREAD_ROWS = 16


def check_shards(network: Any, config: Any, num_ranks: int) -> None:
    """Raise ConfigError, naming what cannot be cut, before any rank changes or loads anything."""
    for number in range(num_ranks):
        _Sharding(network, config, Rank(number, num_ranks)).find_cuts()


def shard_network(network: Any, config: Any, rank: Rank, all_reduce: AllReduce) -> dict[str, Cut]:
    """Change a network of shapes (meta device) to one rank's; return the cuts of its tensors by their names there.

    `config` is the text model's. `all_reduce` is called in each forward pass, in the same order on every rank.
    """
    sharding = _Sharding(network, config, rank)
    cuts = sharding.find_cuts()
    sharding.apply(cuts, all_reduce)
    return cuts


def num_reductions(network: Any) -> int:
    """Return how often a forward pass sums over the ranks."""
    return sum(1 for module in network.modules() for hook in module._forward_hooks.values() if isinstance(hook, _Sum))


class _Sharding:
    """One rank's view of one network."""

    def __init__(self, network: Any, config: Any, rank: Rank) -> None:
        self._network, self._rank, self._kind = network, rank, config.model_type
        self._roles = _roles(network, config.model_type)
        heads = config.num_attention_heads
        self._heads, self._kv_heads = heads, getattr(config, "num_key_value_heads", None) or heads
        self._share = share_heads(self._heads, self._kv_heads, rank)
        self._num_layers: int = config.num_hidden_layers

    def find_cuts(self) -> dict[str, Cut]:
        """Return the cuts of all tensors. Raises ConfigError, changes nothing."""
        cuts: dict[str, Cut] = {}
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
                f"{self._kind}: {attentions} of {self._num_layers} layers have query, key and value projections "
                f"that can be cut for {self._rank.of} ranks: use --tensor-parallel-size 1"
            )
        if self._rank.number > 0:
            cuts.update(self._cut_head())
        return cuts

    @torch.no_grad()
    def apply(self, cuts: dict[str, Cut], all_reduce: AllReduce) -> None:
        """Change the network as `cuts` say."""
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
                if role == "rowwise" and module.bias is not None and self._rank.number > 0:
                    module.register_parameter("bias", None)
            if isinstance(module, nn.Module) and role in ("rowwise", "moe_tp_experts"):
                module.register_forward_hook(_Sum(all_reduce))
        for _, module in self._network.named_modules():
            if _is_attention(module):
                self._tell_heads(module)
        head = self._network.get_output_embeddings()
        if isinstance(head, nn.Linear):
            head.out_features = len(head.weight)

    def _cut_attention(self, path: str, module: Any) -> Iterator[tuple[str, Cut]]:
        own = {f"{path}.{name}" for name, _ in module.named_children()} | {
            f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)
        }
        for name in sorted(own):
            if name in self._roles:
                yield from self._cut_projection(name, self._find(name))
            elif _num_elements(self._find(name)) > module.head_dim:
                raise ConfigError(self._no_role(name))

    def _cut_projection(self, name: str, module: Any) -> Iterator[tuple[str, Cut]]:
        role, last = self._roles[name], name.rpartition(".")[2]
        query = role == "rowwise" or last == "q_proj"
        if role in _WHOLE:
            return
        if role == _FUSED_QKV:
            yield from self._cut_fused_qkv(name, module)
            return
        if not isinstance(module, nn.Linear) or (not query and last not in ("k_proj", "v_proj")):
            raise ConfigError(self._no_role(name))
        count, held = (self._heads, self._share.query) if query else (self._kv_heads, self._share.kv)
        size = module.in_features if role == "rowwise" else module.out_features
        if size % count:
            raise ConfigError(f"{name}: a size of {size} does not divide into {count} heads, so it cannot be cut")
        dim = size // count
        yield from _cut_linear(name, module, role, (held.start * dim, held.end * dim))

    def _cut_fused_qkv(self, name: str, module: nn.Linear) -> Iterator[tuple[str, Cut]]:
        count = self._heads + 2 * self._kv_heads
        if module.out_features % count:
            raise ConfigError(f"{name}: a size of {module.out_features} does not divide into {count} heads")
        dim, (query, kv) = module.out_features // count, (self._share.query, self._share.kv)
        ranges = [(query.start * dim, query.end * dim)]
        for first in (self._heads, self._heads + self._kv_heads):  # keys, then values
            ranges.append(((first + kv.start) * dim, (first + kv.end) * dim))
        yield from _cut_linear(name, module, "colwise", *ranges)

    def _cut_inner(self, name: str, module: nn.Linear) -> Iterator[tuple[str, Cut]]:
        role = self._roles[name]
        if role not in _WHOLE and module is not self._network.get_output_embeddings():
            size = module.in_features if role == "rowwise" else module.out_features
            if role == _FUSED_GATE_UP:
                start, end = share_inner(name, size // 2, self._rank)
                yield from _cut_linear(name, module, role, (start, end), (size // 2 + start, size // 2 + end))
            else:
                yield from _cut_linear(name, module, role, share_inner(name, size, self._rank))

    def _cut_experts(self, path: str, module: Any) -> Iterator[tuple[str, Cut]]:
        gate_up, down = module.gate_up_proj, module.down_proj
        others = [name for name, _ in module.named_parameters() if name not in ("gate_up_proj", "down_proj")]
        inner = down.shape[2]
        if others or gate_up.shape[1] != 2 * inner or self._roles.get(path) != "moe_tp_experts":
            raise ConfigError(self._no_role(f"{path}.{[*others, 'gate_up_proj'][0]}"))
        start, end = share_inner(path, inner, self._rank)
        yield f"{path}.gate_up_proj", Cut(1, ((start, end), (inner + start, inner + end)))
        yield f"{path}.down_proj", Cut(2, ((start, end),))

    def _cut_head(self) -> Iterator[tuple[str, Cut]]:
        """Leave the first rows of an output layer that is not the embedding too: no one reads what they make."""
        head, embeddings = self._network.get_output_embeddings(), self._network.get_input_embeddings()
        if not isinstance(head, nn.Linear) or head.weight is embeddings.weight:
            return
        (name,) = (name for name, module in self._network.named_modules() if module is head)
        rows = (0, min(_UNREAD_ROWS, head.out_features))
        yield f"{name}.weight", Cut(0, (rows,))
        if head.bias is not None:
            yield f"{name}.bias", Cut(0, (rows,))

    def _tell_heads(self, module: Any) -> None:
        """Some modules shape their heads by counts they keep."""
        query, kv = (held.end - held.start for held in (self._share.query, self._share.kv))
        for name, value in (
            ("num_heads", query), ("num_attention_heads", query), ("num_key_value_heads", kv),
            ("num_key_value_groups", query // kv),
        ):  # fmt: skip
            if hasattr(module, name):
                setattr(module, name, value)
        if not hasattr(module, "q_proj"):  # it finds its query by the config's number of heads
            module.config = _LocalConfig(module.config, {"num_attention_heads": query, "num_key_value_heads": kv})

    def _in_attention(self, path: str) -> bool:
        return _is_attention(self._network.get_submodule(path.rpartition(".")[0]))

    def _find(self, path: str) -> Any:
        parent, _, last = path.rpartition(".")
        return getattr(self._network.get_submodule(parent), last)

    def _no_role(self, name: str) -> str:
        role = self._roles.get(name)
        what = f"is {role} there" if role else "is not in it"
        return (
            f"{self._kind} cannot be cut for {self._rank.of} ranks by its tensor-parallel plan: {name} {what}; "
            "use --tensor-parallel-size 1"
        )


class _LocalConfig:
    """A config as one rank's attention reads it: its own numbers of heads, all else as it is now."""

    def __init__(self, config: Any, own: dict[str, int]) -> None:
        self._config, self._own = config, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._config, name)


class _Sum:
    """A forward hook that sums a module's output over the ranks."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self._all_reduce(output)


def _roles(network: Any, kind: str) -> dict[str, str]:
    """Return the roles of modules and parameters by their paths. Raises ConfigError for those we do not know."""
    plan: dict[str, str] = getattr(network, "tp_plan", None) or {}
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"[^.]+") + "$"), role) for key, role in plan.items()]
    names = [name for name, _ in network.named_modules()] + [name for name, _ in network.named_parameters()]
    roles = {name: role for name in names for pattern, role in patterns if pattern.match(name)}
    roles |= {
        name: role for path, module in network.named_modules() for name, role in _fused_roles(path, module, roles)
    }
    head = network.get_output_embeddings()
    heads = {name for name, module in network.named_modules() if module is head}
    known = (*_WHOLE, _FUSED_QKV, _FUSED_GATE_UP, "colwise", "rowwise", "packed_colwise", "moe_tp_experts")
    for name, role in roles.items():
        if role not in known and name not in heads:
            raise ConfigError(
                f"{kind} cannot be cut for several ranks: its tensor-parallel plan has {name} as {role}, which is not "
                f"one of {', '.join(known)}; use --tensor-parallel-size 1"
            )
    return roles


def _fused_roles(path: str, module: Any, roles: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the roles of projections that the plan leaves whole because they are fused."""
    for fused, last, role in (("qkv_proj", "o_proj", _FUSED_QKV), ("gate_up_proj", "down_proj", _FUSED_GATE_UP)):
        names = f"{path}.{fused}", f"{path}.{last}"
        linears = all(isinstance(getattr(module, name, None), nn.Linear) for name in (fused, last))
        if linears and [roles.get(name) for name in names] == ["colwise_gather_output", "rowwise_split_input"]:
            yield names[0], role
            yield names[1], "rowwise"


def _cut_linear(name: str, module: nn.Linear, role: str, *taken: tuple[int, int]) -> Iterator[tuple[str, Cut]]:
    yield f"{name}.weight", Cut(1 if role == "rowwise" else 0, taken)
    if module.bias is not None and role != "rowwise":
        yield f"{name}.bias", Cut(0, taken)


def _is_attention(module: Any) -> bool:
    if isinstance(getattr(module, "qkv_proj", None), nn.Linear):
        return True
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in ("q_proj", "k_proj", "v_proj"))


def _num_elements(found: Any) -> int:
    tensors = [found] if isinstance(found, torch.Tensor) else [*found.parameters()]
    return sum(tensor.numel() for tensor in tensors)
