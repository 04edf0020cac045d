"""The prefixes that an instance is assumed to cache, by tenant and within bounds."""

import hashlib
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler.load.prefixes import DIGEST_TOKENS, Chain, Prefixes, chain_of
from tests.examples import examples
from wire.types import PromptImage

LONG = tuple(range(1000))


def test_a_chain_has_one_hash_for_each_64_tokens_and_all_before() -> None:
    chain = chain_of(LONG[:200], "")

    assert len(chain) == 3
    for count, digest in enumerate(chain, 1):
        reported = b"".join(token.to_bytes(4, "little") for token in LONG[: 64 * count])
        assert digest == hashlib.sha256(bytes(4) + reported).digest()[:16]
    assert chain_of(LONG[:63], "") == chain_of((), "") == ()


def test_only_prompts_with_a_common_prefix_share_links() -> None:
    mine = chain_of(LONG[:200], "a")

    assert chain_of(LONG[:500], "a")[:3] == mine
    assert not set(chain_of(LONG[:200], "b")) & set(mine)
    other = chain_of((*LONG[:100], 7, *LONG[101:200]), "a")
    assert (other[0] == mine[0], other[1] == mine[1], other[2] == mine[2]) == (True, False, False)


def test_a_salt_and_equal_looking_tokens_change_the_hash() -> None:
    assert chain_of(LONG[:64], "a")[0] != chain_of((ord("a"), *LONG[:63]), "")[0]


def test_equal_ids_of_other_images_share_links_up_to_the_image() -> None:
    image = PromptImage(70, 100, b"a" * 32, (1, 10, 10))
    mine = chain_of(LONG[:300], "", (image,))

    assert chain_of(LONG[:300], "", (replace(image, data=b"file"),)) == mine
    for other in (chain_of(LONG[:300], "", (replace(image, digest=b"b" * 32),)), chain_of(LONG[:300], "")):
        assert (other[0] == mine[0], set(other[1:]) & set(mine[1:])) == (True, set())


def test_a_recorded_prefix_is_found_up_to_the_difference() -> None:
    it = Prefixes(100_000)
    it.note(chain_of(LONG[:300], ""))

    assert it.tokens_known(chain_of(LONG, "")) == 256
    assert it.tokens_known(chain_of(LONG[:130], "")) == 128
    assert it.tokens_known(chain_of((*LONG[:100], 7, *LONG), "")) == 64
    assert it.tokens_known(chain_of(LONG, "another tenant")) == 0


def test_tokens_are_shared_while_a_prompt_runs_and_cached_after() -> None:
    it, chain = Prefixes(100_000), chain_of(LONG, "")
    it.run("a", chain[:4])
    it.run("b", chain[:2])
    assert it.tokens_running(chain) == 256

    it.end("a")
    it.end("a")
    assert (it.tokens_running(chain), it.tokens_known(chain)) == (128, 256)
    it.run("b", chain[:1])  # a second time, in place of the first
    assert it.tokens_running(chain) == 64
    it.end("b")
    assert it.tokens_running(chain) == 0


def test_chains_are_bounded_by_the_pool_and_evicted_from_the_end() -> None:
    it = Prefixes(5 * DIGEST_TOKENS)
    first, second = chain_of(LONG[:256], "first"), chain_of(LONG[:192], "second")
    it.note(first)
    it.note(second)

    assert len(it) == 5
    assert (it.tokens_known(first), it.tokens_known(second)) == (128, 192)
    it.note(chain_of(LONG, "longer than all"))
    assert len(it) == 5
    assert it.tokens_known(chain_of(LONG, "longer than all")) == 320


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Prompts over two letters that often have a common prefix."""
    letters = draw(st.lists(st.booleans(), max_size=6))
    return chain_of([int(letter) for letter in letters for _ in range(64)], "")


@examples(200)
@given(st.integers(0, 12), st.lists(chains(), max_size=12), chains())
def test_the_known_prefix_is_the_chain_from_its_first_hash(maximum: int, noted: list[Chain], requested: Chain) -> None:
    it = Prefixes(maximum * DIGEST_TOKENS)
    for number, chain in enumerate(noted):
        it.note(chain)
        if number % 3 == 0:
            it.run(str(number), chain)

    known = [digest in it._known for digest in requested]
    assert known == sorted(known, reverse=True), "a digest is known without the ones before it"
    assert it.tokens_known(requested) == 64 * sum(known)
    assert not requested or it.may_have(requested) == bool(it.tokens_known(requested) + it.tokens_running(requested))
    assert len(it) == min(max(1, maximum), len({digest for chain in noted for digest in chain}))
