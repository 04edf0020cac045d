"""Equal token ids of prompts share one int object."""

import asyncio

from scheduler.tokenizer.shared_ids import SharedIds
from scheduler.tokens import Tokens

BIG = 1000


def test_equal_ids_are_one_object_and_the_same_numbers() -> None:
    shared = SharedIds(5000)
    one, other = shared.of([BIG + 1, 3, BIG + 1]), shared.of([int("1001"), 4999])

    assert one == (1001, 3, 1001)
    assert other == (1001, 4999)
    assert one[0] is one[2] is other[0]


def test_ids_beyond_the_vocabulary_are_kept() -> None:
    assert SharedIds(10).of([3, 10, 70_000]) == (3, 10, 70_000)


async def _ids(tokens: Tokens, text: str) -> tuple[int, ...]:
    return await tokens.encode(text, add_special_tokens=False)


def test_ids_of_the_tokenizer_are_shared(tokens: Tokens) -> None:
    one, other = asyncio.run(_ids(tokens, "hello world hello")), asyncio.run(_ids(tokens, " hello" * 1000))
    large = {token_id: token_id for token_id in one if token_id > 256}

    assert large
    assert all(large[token_id] is token_id for token_id in other if token_id in large)
    assert any(token_id in large for token_id in other)
