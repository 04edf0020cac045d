"""Embeddings that were sent with a prompt in place of an image file, in the engine's type; torch converts them."""

from wire.errors import InvalidRequest
from wire.kv_layout import ITEM_BYTES
from wire.types import PromptImage


def convert_embeddings(image: PromptImage, dtype: str) -> bytes:
    """Return the values of `image.data` as `dtype`. Raises InvalidRequest for a wrong size or a value out of range."""
    if not image.data or len(image.data) % (image.count * ITEM_BYTES[image.dtype]):
        raise InvalidRequest(
            f"its embeddings have {len(image.data)} bytes, but must have a positive multiple of "
            f"{image.count * ITEM_BYTES[image.dtype]}: {image.dtype} values for each token"
        )
    if image.dtype == dtype:
        return image.data
    import torch  # an instance of the fake engine has none

    sent = torch.frombuffer(bytearray(image.data), dtype=getattr(torch, image.dtype))
    values = sent.to(getattr(torch, dtype))
    if not torch.isfinite(values).all():
        largest = sent.abs().max().item()
        raise InvalidRequest(
            f"its embeddings have a magnitude of {largest:g}, out of range for {dtype}, the engine's dtype"
        )
    return values.view(torch.uint8).numpy().tobytes()
