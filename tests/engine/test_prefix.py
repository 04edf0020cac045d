"""Names of blocks: plain sha256 of their contents, equal across block sizes, different for other tokens and salts."""

import hashlib
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prefix import PrefixChain, why_no_names
from wire.types import PromptImage

IDS = tuple(range(1000, 1100))


def digests_by_hand(token_ids: tuple[int, ...], salt: str) -> list[bytes]:
    """Return every digest of 16 tokens, by the definition."""
    digests, parent = [], hashlib.sha256(b"model").digest()
    for start in range(0, len(token_ids) // 16 * 16, 16):
        packed = b"".join(token.to_bytes(4, "little") for token in token_ids[start : start + 16])
        parent = hashlib.sha256(parent + packed + salt.encode()).digest()
        digests.append(parent)
    return digests


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.text(max_size=4))
def test_a_block_of_sixteen_has_the_digest_by_definition(token_ids: list[int], salt: str) -> None:
    names = PrefixChain(salt, 16, "model").names(token_ids, len(token_ids))

    assert [name.digest for name in names] == digests_by_hand(tuple(token_ids), salt)
    assert [name.token_ids for name in names] == [tuple(token_ids[i * 16 : i * 16 + 16]) for i in range(len(names))]
    assert all(name.parent == before.digest for before, name in pairwise(names))


@pytest.mark.parametrize("block_size", [32, 48])
def test_larger_blocks_are_named_by_the_digest_at_their_end(block_size: int) -> None:
    small = [name.digest for name in PrefixChain("t", 16).names(IDS, 96)]
    large = [name.digest for name in PrefixChain("t", block_size).names(IDS, 96)]

    assert large == small[block_size // 16 - 1 :: block_size // 16]


def test_only_full_blocks_of_the_requested_tokens_have_names() -> None:
    chain = PrefixChain("", 32)

    assert [len(chain.names(IDS, count)) for count in (0, 31, 32, 63, 64, 100)] == [0, 0, 1, 1, 2, 3]
    assert chain.num_full(95) == 2


def test_no_name_is_shared_by_other_salts_roots_or_tokens_before() -> None:
    other = (*IDS[:20], 7, *IDS[21:])
    mine = [name.digest for name in PrefixChain("a", 16).names(IDS, 96)]

    assert not set(mine) & {name.digest for name in PrefixChain("b", 16).names(IDS, 96)}
    assert not set(mine) & {name.digest for name in PrefixChain("a", 16, "another model").names(IDS, 96)}
    changed = [name.digest for name in PrefixChain("a", 16).names(other, 96)]
    assert (changed[0], set(mine[1:]) & set(changed[1:])) == (mine[0], set())


def test_equal_ids_of_other_images_share_names_up_to_the_image() -> None:
    def digests(*images: PromptImage, salt: str = "t") -> list[bytes]:
        return [name.digest for name in PrefixChain(salt, 16, images=images).names(IDS, 96)]

    first, second = PromptImage(20, 30, b"a" * 32, (1, 1, 30)), PromptImage(70, 5, b"b" * 32, (1, 1, 5))
    mine = digests(first, second)

    def num_common(other: list[bytes]) -> int:
        return sum(a == b for a, b in zip(mine, other, strict=True))

    assert num_common(digests(replace(first, data=b"file"), second)) == 6
    assert num_common(digests(replace(first, digest=b"c" * 32), second)) == 1
    assert num_common(digests(replace(first, start=19), second)) == 1
    assert num_common(digests(first, replace(second, digest=b"c" * 32))) == 4
    assert num_common(digests(first)) == 4
    assert num_common(digests()) == 1


def test_a_name_tells_images_apart_even_if_digests_collide() -> None:
    image = PromptImage(0, 16, b"a" * 32, (1, 1, 16))
    one, other = (
        PrefixChain("", 16, images=(replace(image, digest=digest * 32),)).name(0, IDS) for digest in (b"a", b"b")
    )

    assert one != other._replace(digest=one.digest)


def test_a_fork_continues_by_itself() -> None:
    chain = PrefixChain("", 16, "model")
    chain.names(IDS, 32)
    left, right = chain.fork(), chain.fork()
    mine, other = (*IDS[:32], *range(16)), (*IDS[:32], *range(16, 32))

    assert left.name(1, mine) == right.name(1, other)
    assert left.name(2, mine).digest == digests_by_hand(mine, "")[2]
    assert right.name(2, other).digest == digests_by_hand(other, "")[2]
    assert chain.names(IDS, 48)[2].digest == digests_by_hand(IDS, "")[2]


def test_a_disabled_chain_names_nothing() -> None:
    chain = PrefixChain("", None)

    assert (chain.names(IDS, 96), chain.num_full(96)) == ([], 0)


@pytest.mark.parametrize(("block_size", "off"), [(16, False), (128, False), (8, True), (24, True), (4, True)])
def test_blocks_not_a_multiple_of_links_have_no_names(block_size: int, off: bool) -> None:
    reason = why_no_names(block_size)

    assert (reason is not None) is off
    assert reason is None or str(block_size) in reason
