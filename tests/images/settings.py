"""Settings of the three families as their published checkpoints have them."""

from typing import Any

LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 32000,
    "vision_feature_select_strategy": "default",
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}
LLAVA_PROCESSOR: dict[str, Any] = {
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
    "do_center_crop": True,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "image_token_id": 151655,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
QWEN_PROCESSOR: dict[str, Any] = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3",
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
}
GEMMA_PROCESSOR: dict[str, Any] = {"size": {"height": 896, "width": 896}}
