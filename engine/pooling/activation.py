"""Turn the logits of classes into the answer by softmax, sigmoid or nothing, as config.json says and vLLM does."""

from collections.abc import Callable
from typing import Any

import torch

from wire.errors import ConfigError

Activation = Callable[[torch.Tensor], torch.Tensor]
"""[num_rows, num_labels] -> the same shape."""


def read_activation(config: Any) -> Activation:
    """Return the activation of a classifier. Raises ConfigError for one that is not supported."""
    by_labels: Activation = torch.sigmoid if config.num_labels < 2 else _softmax
    by_problem: dict[str, Activation] = {"regression": torch.clone, "multi_label_classification": torch.sigmoid}
    problem = getattr(config, "problem_type", None)
    if problem is not None:
        return by_problem.get(problem, by_labels)
    named = _module_name(config)
    known: dict[str, Activation] = {"": by_labels, "Sigmoid": by_labels, "Softmax": by_labels, "Identity": torch.clone}
    if named not in known:
        raise ConfigError(f"config.json: the activation {named} is not supported: only Identity, Sigmoid and Softmax")
    return known[named]


def _module_name(config: Any) -> str:
    """Return the name of the torch.nn class in sentence-transformers' settings of a cross-encoder; empty if none."""
    settings = getattr(config, "sentence_transformers", None)
    named = settings.get("activation_fn") if isinstance(settings, dict) else None
    return str(named or getattr(config, "sbert_ce_default_activation_function", None) or "").rpartition(".")[2]


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, dim=-1)
