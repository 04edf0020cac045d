"""A digest names an image's embeddings for one tenant."""

from itertools import combinations

from images.digest import image_digest


def test_every_part_changes_the_digest() -> None:
    digests = [
        image_digest(data, settings_digest=settings, model=model, cache_salt=salt)
        for data, settings, model, salt in [
            (b"ab", b"c", "d", ""),
            (b"a", b"bc", "d", ""),
            (b"ab", b"c", "", "d"),
            (b"ab", b"", "cd", ""),
        ]
    ]

    assert all(one != other for one, other in combinations(digests, 2))
    assert {len(digest) for digest in digests} == {32}
