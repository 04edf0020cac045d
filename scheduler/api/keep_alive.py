"""Comments in an idle stream, so that no proxy between server and client closes it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

Item = TypeVar("Item")
COMMENT = b": keep-alive\n\n"


async def with_quiet(
    items: AsyncGenerator[Item, None], interval_s: float, written_s: Callable[[], float]
) -> AsyncGenerator[Item | None, None]:
    """Yield what `items` yields, and None when nothing was written for `interval_s` seconds.

    `written_s` returns when the stream was last written, by the loop's clock. Closing this does not close `items`.
    """
    clock = asyncio.get_running_loop().time
    coming = asyncio.ensure_future(anext(items, None))
    try:
        while True:
            await asyncio.wait((coming,), timeout=max(0.0, written_s() + interval_s - clock()))
            if coming.done():
                came = coming.result()
                if came is None:
                    return
                yield came
                coming = asyncio.ensure_future(anext(items, None))
            elif clock() >= written_s() + interval_s:
                yield None
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
