"""The tokens of each family's images; LLaVA's tower and transformers' own processors are the oracle."""

from typing import Any

import pytest
import torch
from PIL import Image
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from images.families import VisionFamily, vision_family
from images.token_count import FixedCount, ImageTokens
from tests.images.settings import GEMMA, GEMMA_PROCESSOR, LLAVA, LLAVA_PROCESSOR, QWEN, QWEN_PROCESSOR
from wire.errors import ConfigError


def family(config: dict[str, Any], processor: dict[str, Any]) -> VisionFamily:
    found = vision_family(config, processor)
    assert found is not None
    return found


def test_a_text_model_has_no_family() -> None:
    assert vision_family({"model_type": "llama"}, {}) is None


def test_llava_replaces_its_placeholder_by_as_many_as_the_patches() -> None:
    llava = family(LLAVA, LLAVA_PROCESSOR)

    assert llava.tokens(640, 480) == ImageTokens(576, (1, 1, 576))
    assert llava.ids(3) == (32000, 32000, 32000)
    assert llava.placeholder_id == 32000


def test_gemma_has_its_fixed_count_between_two_tokens_and_newlines() -> None:
    gemma = family(GEMMA, GEMMA_PROCESSOR)

    assert gemma.tokens(1, 1000).count == 256
    assert gemma.ids(2) == (255999, 262144, 262144, 256000)
    assert (gemma.placeholder_id, gemma.around) == (255999, "\n\n")


def test_qwen_counts_squares_of_merged_patches() -> None:
    qwen = family(QWEN, QWEN_PROCESSOR)

    assert qwen.tokens(280, 560) == ImageTokens(200, (1, 20, 10))
    assert (qwen.placeholder_id, qwen.token_id) == (151655, 151655)


@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize("size", [(28, 28), (50, 31), (7, 300)])
def test_llava_counts_what_its_tower_returns(strategy: str, size: tuple[int, int]) -> None:
    vision = CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, image_size=28, patch_size=7
    )
    text = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=9, vision_feature_select_strategy=strategy
    )
    settings = {"crop_size": {"height": 28, "width": 28}, "size": {"shortest_edge": 28}}
    model = LlavaForConditionalGeneration(config)
    pixels = CLIPImageProcessorPil(**settings)(Image.new("RGB", size), return_tensors="pt")["pixel_values"]

    with torch.no_grad():
        (features,) = model.get_image_features(pixels).pooler_output

    assert family(config.to_dict(), settings).tokens(*size).count == len(features)


def test_a_siglip_tower_has_no_class_token() -> None:
    tower = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    siglip = family(LLAVA | {"vision_config": tower, "vision_feature_select_strategy": "full"}, {})

    assert siglip.size_rule == FixedCount(4)


@pytest.mark.parametrize(
    ("config", "processor", "message"),
    [
        (LLAVA | {"vision_config": {**LLAVA["vision_config"], "model_type": "pixtral"}}, {}, "type pixtral"),
        (LLAVA, {"crop_size": {"height": 224, "width": 224}}, "takes 336 x 336"),
        (LLAVA | {"image_token_index": None}, {}, "image_token_index or image_token_id"),
        (QWEN, QWEN_PROCESSOR | {"do_resize": False}, "do_resize: false"),
        (QWEN, QWEN_PROCESSOR | {"patch_size": 16}, "patch_size 16 and merge_size 2"),
        (QWEN, QWEN_PROCESSOR | {"min_pixels": 10, "max_pixels": 9}, r"invalid limits: 10 to 9 pixels"),
        (QWEN | {"vision_config": None}, QWEN_PROCESSOR, "no vision_config"),
        (GEMMA, GEMMA_PROCESSOR | {"do_pan_and_scan": True}, "do_pan_and_scan: true"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(
    config: dict[str, Any], processor: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        vision_family(config, processor)
