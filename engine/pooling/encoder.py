"""Bidirectional encoders (BERT and similar ones) for vectors, and classifiers of all architectures.

They keep no KV and generate nothing; transformers runs them unchanged, one padded batch at a time, on any device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from devices.cpu import CpuDevice
from devices.interface import Device
from engine.checkpoints.dtypes import choose_dtype, read_cpu_flags
from engine.checkpoints.model_identity import stored_tensors
from engine.pooling.activation import Activation, read_activation
from engine.pooling.vectors import finish_vector
from engine.pooling_settings import PoolingSettings, read_settings
from wire.errors import ConfigError
from wire.shared_limits import unused_positions
from wire.types import Pooling, PromptState

_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CLASSIFIES = "ForSequenceClassification"
_BIDIRECTIONAL = ("Model", "ForMaskedLM", "ForPreTraining")


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """Properties of the model. `tasks` are the kinds of Pooling that it supports; a result has `width` values."""

    tasks: tuple[str, ...]
    width: int
    vocab_size: int
    max_length: int
    dtype: str
    device: str


def is_encoder(path: Path) -> bool:
    """Return whether the model in folder `path` is an encoder. Raises ConfigError if config.json cannot be read."""
    config = _read_config(path)
    named = (config.architectures or [""])[0]
    if named.endswith(_CLASSIFIES):
        return True
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and getattr(config, "is_decoder", None) is not False
    return not causal and named.endswith(_BIDIRECTIONAL) and not config.is_encoder_decoder


class Encoder:
    """A loaded encoder. One thread calls it. A classifier has an `activation` for its logits."""

    def __init__(
        self, network: Any, info: EncoderInfo, settings: PoolingSettings, activation: Activation | None = None
    ) -> None:
        self.info = info
        self._network = network
        self._settings = settings
        self._activation = activation
        self._pad = network.config.pad_token_id or 0
        self._types = int(getattr(network.config, "type_vocab_size", 0) or 0)

    @torch.inference_mode()
    def run(self, states: Sequence[PromptState]) -> list[tuple[float, ...]]:
        """Return each prompt's values, those of its `Pooling.kind`. All prompts are computed as one padded batch."""
        computed = self._compute(states)
        chosen = [self._choose(rows, _pooling_of(state), state) for rows, state in zip(computed, states, strict=True)]
        values = iter(torch.cat(chosen).tolist())
        return [
            tuple(chain.from_iterable(self._finish(next(values), _pooling_of(state)) for _ in rows))
            for rows, state in zip(chosen, states, strict=True)
        ]

    def _compute(self, states: Sequence[PromptState]) -> torch.Tensor:
        """Return hidden states or logits: [batch, longest, width], or [batch, 1, width] from a head over whole texts.

        A decoder's head is applied to each token: transformers would look for the last one by the padding token's id.
        """
        longest = max(len(state.token_ids) for state in states)
        ids = torch.full((len(states), longest), self._pad)  # [batch, longest]
        mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, state in enumerate(states):
            length = len(state.token_ids)
            ids[row, :length] = torch.tensor(state.token_ids)
            mask[row, :length] = 1
            second = state.pooling.second_text if state.pooling is not None else None
            if second is not None:
                types[row, second:length] = 1
        place = self._network.device
        kwargs = {"token_type_ids": types.to(place)} if self._types > 1 else {}
        inputs = {"input_ids": ids.to(place), "attention_mask": mask.to(place), **kwargs}
        if (head := _token_head(self._network)) is not None:
            computed: torch.Tensor = head(self._network.base_model(**inputs, use_cache=False).last_hidden_state)
        else:
            output = self._network(**inputs)
            computed = output.last_hidden_state if self._activation is None else output.logits[:, None]
        return computed

    def _choose(self, rows: torch.Tensor, pooling: Pooling, state: PromptState) -> torch.Tensor:
        """Return the rows of a result in float64, with a classifier's activation: [1 or num_tokens, width]."""
        rows = rows[: len(state.token_ids)].double()
        how = "last" if self._activation is not None else pooling.how or self._settings.how
        if not pooling.of_tokens:
            rows = rows.mean(0, keepdim=True) if how == "mean" else rows[:1] if how == "cls" else rows[-1:]
        return rows if self._activation is None or pooling.normalize is False else self._activation(rows)

    def _finish(self, values: Sequence[float], pooling: Pooling) -> Sequence[float]:
        return finish_vector(values, pooling, self._settings) if self._activation is None else values


def load_encoder(
    path: Path, *, dtype: str, max_model_len: int | None = None, device: Device | None = None
) -> tuple[Encoder, tuple[str, ...]]:
    """Load the model in folder `path` on `device` (default: the CPU); return it with notes for the user.

    Raises ConfigError.
    """
    device = device or CpuDevice()
    device.activate()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    config = _read_config(path)
    activation = read_activation(config) if (config.architectures or [""])[0].endswith(_CLASSIFIES) else None
    settings = read_settings(path, is_decoder=False)
    stored = next((_STORED_DTYPES[t.dtype] for t in stored_tensors(path) if t.dtype in _STORED_DTYPES), "float32")
    choice = choose_dtype(dtype, stored, cpu_flags=read_cpu_flags() if device.traits.pools_on_host else None)
    network = _load(path, config, AutoModel if activation is None else AutoModelForSequenceClassification, choice.name)
    num_bytes = _move(network, device, path)
    length = _length(path, config, settings, max_model_len)
    tasks: tuple[str, ...] = ("embed", "token_embed")
    width = int(config.hidden_size)
    does = f"returns vectors of {width} ({settings.how})"
    if activation is not None:
        tasks = ("classify",) if _token_head(network) is None else ("classify", "token_classify")
        width = int(config.num_labels)
        does = "scores texts and pairs of texts" if width == 1 else f"classifies texts into {width} classes"
    info = EncoderInfo(tasks, width, int(config.vocab_size), length, choice.name, device.name)
    weights = f"{num_bytes / 2**20:.0f} MiB of weights on {device.name}"
    note = f"{'an encoder' if activation is None else 'a classifier'}, {config.model_type}: it {does}; {weights}"
    return Encoder(network, info, settings, activation), (choice.reason, note)


def _load(path: Path, config: Any, auto: Any, dtype: str) -> Any:
    try:
        network, report = auto.from_pretrained(
            path, config=config, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True,
            local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"{path}: its weights cannot be loaded: {error}") from error
    missing = sorted(str(key) for key in report["missing_keys"] if not str(key).startswith("pooler."))
    if missing:
        raise ConfigError(f"{path}: missing keys ({len(missing)}), the first is {missing[0]}")
    return network.eval()


def _move(network: Any, device: Device, path: Path) -> int:
    """Move the network to the device; return its size in bytes. Raises ConfigError if it does not fit."""
    tensors = [*network.parameters(), *network.buffers()]
    num_bytes: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if not device.traits.pools_on_host:
        free = device.memory().free
        if num_bytes > free:
            raise ConfigError(f"{path}: {num_bytes} bytes of weights do not fit on {device.name}: {free} are free")
        network.to(device.torch_device)
    return num_bytes


def _token_head(network: Any) -> torch.nn.Linear | None:
    """Return the head of a decoder that classifies, None for other networks."""
    head = getattr(network, "score", None)
    return head if isinstance(head, torch.nn.Linear) else None


def _pooling_of(state: PromptState) -> Pooling:
    assert state.pooling is not None, "check() refuses prompts without pooling"
    return state.pooling


def _length(path: Path, config: Any, settings: PoolingSettings, requested: int | None) -> int:
    """Return the longest text in tokens."""
    unused = unused_positions(config.model_type, config.pad_token_id)
    own = min(int(config.max_position_embeddings) - unused, settings.max_length or 1 << 30)
    if requested is not None and not 1 <= requested <= own:
        raise ConfigError(f"--max-model-len is {requested}, but must be from 1 to the model's {own}")
    return requested or own


def _read_config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}/config.json is not a model that transformers supports: {error}") from error
