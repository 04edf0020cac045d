"""The families of vision models: which tokens stand for an image of a given size in a checkpoint's prompts. Pure.

family      a template writes    the prompt has                                        tokens of an image
llava       <image>              <image> x count                                       the tower's patches
qwen2_vl    <|image_pad|>        <|image_pad|> x count                                 by the image's size (PatchGrid)
gemma3      <start_of_image>     2 newlines, <start_of_image>, soft token x count,     mm_tokens_per_image
                                 <end_of_image>, 2 newlines
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from images.patch_grid import PatchGrid
from images.token_count import FixedCount, ImageTokens
from wire.errors import ConfigError

Settings = Mapping[str, Any]

_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""What a tower returns besides its patches, by the type of its config."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """How images are represented in the prompts of one checkpoint.

    A chat template writes `placeholder_id` for an image. In the prompt it becomes the text `around`, `begin_ids`, then
    `token_id` count times, `end_ids` and `around` again. Only the `token_id`s get the image's embeddings.
    A template that accepts only text gets the text of `written_ids` in place of an image.
    """

    model_type: str
    placeholder_id: int
    token_id: int
    size_rule: FixedCount | PatchGrid
    begin_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    around: str = ""
    written_ids: tuple[int, ...] = ()

    def tokens(self, width: int, height: int) -> ImageTokens:
        """Return the tokens of an image of this many pixels, after orientation. Raises InvalidRequest."""
        return self.size_rule.tokens(width, height)

    def ids(self, count: int) -> tuple[int, ...]:
        """Return the token ids that replace the placeholder, without the text around them."""
        return (*self.begin_ids, *(self.token_id,) * count, *self.end_ids)


def vision_family(config: Settings, processor: Settings) -> VisionFamily | None:
    """Return the family of a checkpoint by its config.json and its image processor's settings.

    None for a model without images. Raises ConfigError if the images of a known family cannot be served.
    """
    read = _FAMILIES.get(config.get("model_type", ""))
    return None if read is None else read(config, processor)


def _llava(config: Settings, processor: Settings) -> VisionFamily:
    tower = _part(config, "vision_config")
    kind, side, patch = tower.get("model_type"), _number(tower, "image_size"), _number(tower, "patch_size")
    if kind not in _CLASS_TOKENS:
        raise ConfigError(f"llava with a vision tower of type {kind}: only {' and '.join(_CLASS_TOKENS)} are supported")
    crop = processor.get("crop_size") or side
    sides = (crop.get("height"), crop.get("width")) if isinstance(crop, Mapping) else (crop, crop)
    if sides != (side, side):
        raise ConfigError(f"the image processor's crop_size is {crop}, but the vision tower takes {side} x {side}")
    strategy = config.get("vision_feature_select_strategy", "default")
    count = (side // patch) ** 2 + _CLASS_TOKENS[kind] - (strategy == "default")
    token_id = _number(config, "image_token_index", "image_token_id")
    return VisionFamily("llava", token_id, token_id, FixedCount(count))


def _qwen2_vl(config: Settings, processor: Settings) -> VisionFamily:
    tower = _part(config, "vision_config")
    _refuse(processor, do_resize=False)
    token_id = _number(config, "image_token_id")
    patch = processor.get("patch_size", _number(tower, "patch_size"))
    merge = processor.get("merge_size", _number(tower, "spatial_merge_size"))
    if (patch, merge) != (tower["patch_size"], tower["spatial_merge_size"]):
        raise ConfigError(
            f"the image processor has patch_size {patch} and merge_size {merge}, but the vision tower has patch_size "
            f"{tower['patch_size']} and spatial_merge_size {tower['spatial_merge_size']}"
        )
    before, after = (config.get(f"vision_{place}_token_id") for place in ("start", "end"))
    written = (before, token_id, after) if isinstance(before, int) and isinstance(after, int) else (token_id,)
    return VisionFamily(
        config["model_type"], token_id, token_id, PatchGrid.of(processor, patch, merge), written_ids=written
    )


def _gemma3(config: Settings, processor: Settings) -> VisionFamily:
    _refuse(processor, do_pan_and_scan=True)
    begin, end = _number(config, "boi_token_index"), _number(config, "eoi_token_index")
    token_id, count = _number(config, "image_token_index", "image_token_id"), _number(config, "mm_tokens_per_image")
    return VisionFamily("gemma3", begin, token_id, FixedCount(count), (begin,), (end,), "\n\n")


_FAMILIES: dict[str, Callable[[Settings, Settings], VisionFamily]] = {
    "llava": _llava,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_vl,
    "gemma3": _gemma3,
}
VISION_TYPES = tuple(_FAMILIES)
"""The types (config.json's `model_type`) of the models whose images are served."""


def _refuse(processor: Settings, **refused: bool) -> None:
    for name, value in refused.items():
        if processor.get(name) is value:
            raise ConfigError(f"the image processor has {name}: {str(value).lower()}, which is not supported")


def _part(config: Settings, name: str) -> Settings:
    part = config.get(name)
    if not isinstance(part, Mapping):
        raise ConfigError(f"config.json has no {name}")
    return part


def _number(config: Settings, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise ConfigError(f"config.json must have {' or '.join(names)} for its images, a number of 0 or more")
