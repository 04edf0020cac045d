"""Cached embeddings: found by digest, evicted by age, bounded in bytes."""

from engine.vision.embeddings_cache import EmbeddingsCache
from engine.vision.encoded_image import EncodedImage
from images.token_count import ImageTokens

_SIZE = 10_000
_COST = _SIZE + 512


def image(size: int = _SIZE) -> EncodedImage:
    return EncodedImage(ImageTokens(1, (1, 1, 1)), bytes(size))


def test_the_least_recently_used_is_evicted() -> None:
    cache = EmbeddingsCache(2 * _COST)
    for digest in (b"a", b"b"):
        cache.keep(digest, image())
    cache.find(b"a")

    cache.keep(b"c", image())

    assert (cache.find(b"b"), cache.num_bytes) == (None, 2 * _COST)
    assert cache.find(b"a") is not None
    assert cache.find(b"c") is not None


def test_an_image_above_the_limit_evicts_nothing() -> None:
    cache = EmbeddingsCache(2 * _COST)
    cache.keep(b"a", image())

    cache.keep(b"b", image(3 * _SIZE))

    assert len(cache) == 1
    assert cache.find(b"a") is not None


def test_a_digest_is_kept_once() -> None:
    cache = EmbeddingsCache(9 * _COST)
    for _ in range(3):
        cache.keep(b"a", image())

    assert (len(cache), cache.num_bytes) == (1, _COST)
