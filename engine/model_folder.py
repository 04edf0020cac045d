"""Open and check a model folder, read its weights and describe it, for one rank or several."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.registered import NAME
from engine.checkpoints.checkpoint import Checkpoint, eos_token_ids, model_length, open_checkpoint
from engine.checkpoints.model_identity import identify, name_of
from engine.checkpoints.stored_weights import StoredWeights
from engine.grid_rotary import rotate_by_grid
from engine.headless import headless_weights, is_headless, tie_head
from engine.interface import EngineInfo
from engine.network import LoadedNetwork, Shard, load_network
from engine.pooling_settings import read_settings
from engine.quantization.detect import find_quantization
from engine.quantization.interface import Layout
from engine.quantization.load import kept_count, kept_note, make_keeper, plain_weights
from engine.rope_lengths import rope_lengths
from engine.row_check import check_untried
from wire.kv_layout import PoolLayout

_WITHIN = "steps with image tokens run on the reference attention, since these tokens see each other both ways"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checkpoint that can be served; its weights are not read yet. `is_headless`: the model returns only vectors."""

    path: Path
    checkpoint: Checkpoint
    quantization: Layout | None
    is_headless: bool


@dataclass(frozen=True, slots=True)
class ReadNetwork:
    """A network with its weights, notes about them, and the bytes read.

    `kept_bytes` are the weights of the linear layers that remain quantised; `kept` states how many
    quantised layers these are and why others are dequantised, as text; empty if none were to be kept.
    """

    loaded: LoadedNetwork
    notes: tuple[str, ...]
    bytes_read: int
    kept_bytes: int = 0
    kept: str = ""


def open_folder(path: Path, quantization: str | None = None) -> ModelFolder:
    """Check everything but the weights. Raises ConfigError.

    `quantization` must be the checkpoint's method; None uses it.
    """
    checkpoint = open_checkpoint(path)
    layout = find_quantization(path, quantization)
    headless = is_headless(checkpoint)
    if headless:
        tie_head(checkpoint)
    return ModelFolder(path, checkpoint, layout, headless)


def read_network(
    folder: ModelFolder, dtype: str, shard: Shard | None = None, device: torch.device | None = None,
    kept_linears: Sequence[str] = (),
) -> ReadNetwork:  # fmt: skip
    """Read the weights, or with `shard` one rank's, into a network that runs our attention. Raises ConfigError.

    The weights are placed on `device`, by default in host memory. `kept_linears`: the formats in which
    linear layers and experts may stay quantised (Traits.kept_linears).
    """
    with StoredWeights(folder.path) as stored:
        plain = plain_weights(folder.checkpoint.weights(stored), folder.quantization, dtype, kept_linears)
        prefix = folder.checkpoint.network_class.base_model_prefix
        weights = headless_weights(plain.weights, prefix) if folder.is_headless else plain.weights
        keeper = make_keeper(plain, folder.quantization, kept_linears, f"{prefix}." if folder.is_headless else "")
        loaded = load_network(
            folder.checkpoint, weights, dtype=dtype, attention=NAME, shard=shard, device=device, keep=keeper,
            adds_biases=folder.quantization is not None and folder.quantization.adds_biases,
        )  # fmt: skip
    check_untried(loaded.network, dtype)
    if folder.checkpoint.rope_sections:
        rotate_by_grid(loaded.network, folder.checkpoint.rope_sections)
    images = folder.checkpoint.images
    within = _WITHIN if images is not None and images.attends_within else None
    note = kept_note(plain, folder.quantization, dtype, keeper)
    return ReadNetwork(
        loaded, tuple(note for note in (loaded.note, note, within) if note), stored.bytes_read,
        kept_bytes=0 if keeper is None else keeper.kept_bytes,
        kept=kept_count(plain, dtype, keeper),
    )  # fmt: skip


def describe(
    folder: ModelFolder, network: object, *, name: str | None, max_model_len: int | None, dtype: str,
    layout: PoolLayout, device: str = "cpu",
) -> EngineInfo:  # fmt: skip
    """Return the EngineInfo of an engine over this model and a pool of this layout."""
    text, images = folder.checkpoint.text_config, folder.checkpoint.images
    return EngineInfo(
        model=identify(folder.path, name or name_of(folder.path)),
        max_model_len=model_length(folder.checkpoint, max_model_len),
        vocab_size=text.vocab_size,
        dtype=dtype,
        device=device,
        layout=layout,
        eos_token_ids=eos_token_ids(network),
        rope=rope_lengths(text),
        pooling=read_settings(folder.path, is_decoder=True),
        hidden_size=text.hidden_size,
        generates=not folder.is_headless,
        takes_images=images is not None,
        rope_sections=folder.checkpoint.rope_sections,
        images_attend_within=images is not None and images.attends_within,
    )
