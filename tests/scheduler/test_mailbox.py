"""A mailbox: its reader takes everything at once, in order, and loses nothing."""

import asyncio

import pytest

from scheduler.mailbox import Mailbox


@pytest.mark.anyio
async def test_all_items_are_taken_at_once_and_in_order() -> None:
    box = Mailbox[int]()
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    for item in range(3):
        box.put(item)

    assert await taking == [0, 1, 2]
    box.put(3)
    assert await box.take() == [3]


@pytest.mark.anyio
async def test_a_cancelled_reader_leaves_the_items_for_the_next() -> None:
    box = Mailbox[int]()
    for is_woken in (False, True):
        taking = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        if is_woken:
            box.put(5)
        taking.cancel()
        await asyncio.wait({taking})
        assert taking.cancelled()

    assert await box.take() == [5]
