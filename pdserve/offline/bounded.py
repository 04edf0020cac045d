"""Apply an async function to many items, a bounded number at once."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")


async def bounded(items: Sequence[T], work: Callable[[T], Awaitable[R]], limit: int) -> list[R]:
    """Return the results of `work` in order; the first error cancels the rest and is raised."""
    made: list[R | None] = [None] * len(items)
    waiting = iter(enumerate(items))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(items))):
                group.create_task(_take(waiting, work, made))
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return cast("list[R]", made)


async def _take(
    waiting: Iterable[tuple[int, T]], work: Callable[[T], Awaitable[R]], made: list[R | None]
) -> None:  # fmt: skip
    for index, item in waiting:
        made[index] = await work(item)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
