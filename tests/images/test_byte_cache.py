"""A cache of values: found by key, evicted by age, bounded in bytes."""

from images.byte_cache import ByteCache

_SIZE = 10_000
_COST = _SIZE + 512


def _cache(limit_bytes: int) -> ByteCache[str, bytes]:
    return ByteCache(limit_bytes, len)


def test_the_least_recently_used_is_evicted() -> None:
    cache = _cache(2 * _COST)
    for key in "ab":
        cache.keep(key, bytes(_SIZE))
    cache.find("a")

    cache.keep("c", bytes(_SIZE))

    assert (cache.find("b"), cache.num_bytes) == (None, 2 * _COST)
    assert cache.find("a") is not None
    assert cache.find("c") is not None


def test_a_value_above_the_limit_evicts_nothing() -> None:
    cache = _cache(2 * _COST)
    cache.keep("a", bytes(_SIZE))

    cache.keep("b", bytes(3 * _SIZE))

    assert len(cache) == 1
    assert cache.find("a") is not None


def test_a_later_value_replaces_the_earlier_one() -> None:
    cache = _cache(9 * _COST)
    for size in (9, 99, _SIZE):
        cache.keep("a", bytes(size))

    assert (len(cache), cache.num_bytes, cache.find("a")) == (1, _COST, bytes(_SIZE))
