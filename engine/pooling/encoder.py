"""Bidirectional encoder models: BERT and similar ones for vectors, and cross-encoders for scores.

They keep no KV and generate nothing; transformers runs them unchanged, one padded batch at a time, on any device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
from engine.pooling.vectors import finish_vector
from engine.pooling_settings import PoolingSettings, read_settings
from wire.errors import ConfigError
from wire.shared_limits import unused_positions
from wire.types import Pooling, PromptState

_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SCORES = "ForSequenceClassification"
_BIDIRECTIONAL = ("Model", "ForMaskedLM", "ForPreTraining", _SCORES)


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """Properties of the model. `kind` is embed or score; `hidden_size` is the length of its vectors."""

    kind: str
    hidden_size: int
    vocab_size: int
    max_length: int
    dtype: str
    device: str


def is_encoder(path: Path) -> bool:
    """Return whether the model in folder `path` is an encoder. Raises ConfigError if config.json cannot be read."""
    config = _read_config(path)
    named = (config.architectures or [""])[0]
    if named.endswith(_SCORES):
        return True
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and getattr(config, "is_decoder", None) is not False
    return not causal and named.endswith(_BIDIRECTIONAL) and not config.is_encoder_decoder


class Encoder:
    """A loaded encoder. One thread calls it."""

    def __init__(self, network: Any, info: EncoderInfo, settings: PoolingSettings) -> None:
        self.info = info
        self._network = network
        self._settings = settings
        self._pad = network.config.pad_token_id or 0
        self._types = int(getattr(network.config, "type_vocab_size", 0) or 0)

    @torch.inference_mode()
    def run(self, states: Sequence[PromptState]) -> list[tuple[float, ...]]:
        """Return the vector, or only the score, of each prompt; all are computed as one padded batch."""
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
        output = self._network(input_ids=ids.to(place), attention_mask=mask.to(place), **kwargs)
        if self.info.kind == "score":
            return [(value,) for value in output.logits[:, 0].double().sigmoid().tolist()]
        hidden = output.last_hidden_state.float()  # [batch, longest, hidden_size]
        pooled = torch.stack([self._pool(hidden[row, : len(one.token_ids)], one) for row, one in enumerate(states)])
        return [
            finish_vector(values, _pooling_of(state), self._settings)
            for values, state in zip(pooled.tolist(), states, strict=True)
        ]

    def _pool(self, hidden: torch.Tensor, state: PromptState) -> torch.Tensor:
        """Pool [num_tokens, hidden_size] to [hidden_size] float64."""
        how = _pooling_of(state).how or self._settings.how
        return hidden.double().mean(0) if how == "mean" else hidden[0 if how == "cls" else -1].double()


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
    kind = "score" if (config.architectures or [""])[0].endswith(_SCORES) else "embed"
    if kind == "score" and config.num_labels != 1:
        raise ConfigError(f"{path}: it has {config.num_labels} labels; a cross-encoder that scores pairs has 1")
    settings = read_settings(path, is_decoder=False)
    stored = next((_STORED_DTYPES[t.dtype] for t in stored_tensors(path) if t.dtype in _STORED_DTYPES), "float32")
    choice = choose_dtype(dtype, stored, cpu_flags=read_cpu_flags() if device.traits.pools_on_host else None)
    network = _load(path, config, kind, choice.name)
    num_bytes = _move(network, device, path)
    length = _length(path, config, settings, max_model_len)
    info = EncoderInfo(kind, int(config.hidden_size), int(config.vocab_size), length, choice.name, device.name)
    does = "scores pairs of texts" if kind == "score" else f"returns vectors of {info.hidden_size} ({settings.how})"
    weights = f"{num_bytes / 2**20:.0f} MiB of weights on {device.name}"
    return Encoder(network, info, settings), (choice.reason, f"an encoder, {config.model_type}: it {does}; {weights}")


def _load(path: Path, config: Any, kind: str, dtype: str) -> Any:
    auto = AutoModelForSequenceClassification if kind == "score" else AutoModel
    try:
        network, report = auto.from_pretrained(
            path, config=config, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True,
            local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"{path}: its weights cannot be loaded: {error}") from error
    missing = sorted(str(key) for key in report["missing_keys"] if not str(key).startswith("pooler."))
    if missing:
        raise ConfigError(f"{path}: {len(missing)} missing keys, the first {missing[0]}")
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


def _pooling_of(state: PromptState) -> Pooling:
    assert state.pooling is not None, "check() refuses prompts without pooling"
    return state.pooling


def _length(path: Path, config: Any, settings: PoolingSettings, requested: int | None) -> int:
    """Return the longest text in tokens."""
    unused = unused_positions(config.model_type, config.pad_token_id)
    own = min(int(config.max_position_embeddings) - unused, settings.max_length or 1 << 30)
    if requested is not None and not 1 <= requested <= own:
        raise ConfigError(f"--max-model-len {requested}: must be from 1 to the model's {own}")
    return requested or own


def _read_config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}/config.json is not a model that transformers supports: {error}") from error
