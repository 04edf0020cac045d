"""The vision tower and projector of a checkpoint with transformers' own image processor; runs in the child.

The text network is not loaded: the model is built with no text layers and a vocabulary of one token, and what is left
of the text network is dropped.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from engine.checkpoints.dtypes import choose_dtype, read_cpu_flags
from engine.vision.encoded_image import EncodedImage
from engine.vision.processor import load_processor
from images.checkpoint import read_vision
from images.image_file import decode
from wire.errors import ConfigError, InternalError


class VisionTower:
    """Owner of the tower's weights on a device."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        """Load the tower; `dtype` is that of its embeddings. Raises ConfigError for a folder without a whole tower."""
        vision = read_vision(folder)
        if vision is None:
            raise ConfigError(f"{folder} has no vision tower")
        self._family, self._device, self._dtype = vision.family, device, getattr(torch, dtype)
        self._inputs_of = load_processor(folder, device)
        computed = choose_dtype("auto", dtype, cpu_flags=read_cpu_flags() if device == "cpu" else None)
        self._network = _load(folder, getattr(torch, computed.name)).to(device).eval()

    @property
    def num_bytes(self) -> int:
        """The size of its weights."""
        return sum(parameter.nbytes for parameter in self._network.parameters())

    @torch.inference_mode()
    def encode(self, data: bytes) -> EncodedImage:
        """Return the embeddings of an image file. Raises InvalidRequest."""
        image = decode(data)
        tokens = self._family.tokens(*image.size)
        inputs = self._inputs_of(image)
        known = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
        features = self._network.get_image_features(
            **{name: value.to(self._device, self._dtype_of(value)) for name, value in known.items()}
        ).pooler_output
        rows = torch.cat([part.flatten(0, -2) for part in features])  # [count, hidden_size]
        if len(rows) != tokens.count:
            raise InternalError(
                f"the vision tower returned {len(rows)} embeddings for an image of {tokens.count} tokens"
            )
        values = rows.to(self._dtype).contiguous().cpu()
        return EncodedImage(tokens, values.view(torch.uint8).numpy().tobytes())

    def _dtype_of(self, value: torch.Tensor) -> torch.dtype:
        return self._network.dtype if value.is_floating_point() else value.dtype


def _load(folder: Path, dtype: torch.dtype) -> Any:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # of the text network: towers are not quantised
    network, report = AutoModel.from_pretrained(
        folder, config=config, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True,
        trust_remote_code=False,
    )  # fmt: skip
    wrong = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
    wrong = [name for name in wrong if "language_model" not in name]
    if wrong:
        raise ConfigError(f"{folder}: the vision tower lacks tensors ({len(wrong)}), such as {wrong[0]}")
    network.language_model = None
    return network
