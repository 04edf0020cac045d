"""The record of a model family. Pure, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """How GGUF files store a family: as Llama's tensors, with these `biases` and `norms` (GGUF's names in a layer).

    `network_class` is its class in transformers. `pairs_neighbours`: rotary embedding rotates neighbouring rows.
    """

    network_class: str
    pairs_neighbours: bool = False
    biases: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """How the text network of a family with a vision tower runs (docs/adr/0025).

    `text_type` is the model type that runs it (None: the one that its config names). `has_grid_positions`: an image's
    tokens are rotated by their place in time, height and width. `attends_within`: they attend to each other both ways.
    """

    text_type: str | None = None
    has_grid_positions: bool = False
    attends_within: bool = False


@dataclass(frozen=True, slots=True)
class ModelSupport:
    """How a model type of transformers differs from others, where its config does not show it.

    `is_tested`: every test run compares it with transformers (docs/models.md), so row_check.py need not check it.
    `kv_heads_key`: the config key with the number of heads, for models that store a key and a value per head and layer.
    `needs_head_dim`: without `head_dim` in its config, the head size is not hidden_size / num_attention_heads.
    `drops_kv_past_short_length`: for `longrope`, transformers drops its KV when a sequence outgrows `short_length`.
    `sharding`: roles by the part of a name after the layer's number, which take precedence over transformers' plan.
    `fused_layer`: the class of its decoder layers, for networks that the native kernels can compute whole.
    `gguf`: for families whose GGUF files are converted; the architecture there has the name of the model type.
    `has_gpt2_tokenizer`: a tokenizer with vocab.json and merges.txt is GPT-2's, even if no file names its class.
    `own_attention` names what prevents paging in a network without transformers' attention interface.
    `is_audio`: it is refused as an audio model. `images`: it has a vision tower, and its text network runs.
    """

    model_type: str
    is_tested: bool = False
    kv_heads_key: str | None = None
    needs_head_dim: bool = False
    drops_kv_past_short_length: bool = False
    sharding: Mapping[str, str] = field(default_factory=dict)
    fused_layer: str | None = None
    gguf: GgufFormat | None = None
    has_gpt2_tokenizer: bool = False
    own_attention: str = "attention code of its own"
    is_audio: bool = False
    images: ImageSupport | None = None
