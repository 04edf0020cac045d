"""Find out from running workers which model they serve."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from scheduler.workers.http import WorkerHttp
from wire.errors import Incompatible, PdserveError, Unavailable

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The folder or hub name of the model, the names that clients use, and its longest sequence, 0 if unknown."""

    root: str
    names: tuple[str, ...]
    max_model_len: int


async def find_served_model(
    urls: Sequence[str], api_key: str, can_serve: Callable[[Collection[str]], bool]
) -> ServedModel:
    """Return the model of the first workers that can serve it together, else of the first worker that answers.

    Raises Unavailable with each worker's reason.
    """
    found: dict[str, ServedModel] = {}
    reasons = []

    async def ask(url: str) -> ServedModel | None:
        http = WorkerHttp(url, api_key=api_key)
        try:
            found[url] = read_cards(url, await http.get_json("/v1/models", _TIMEOUT_S))
        except PdserveError as error:
            reasons.append(str(error))
        finally:
            await http.close()
        return found.get(url)

    tasks = [asyncio.create_task(ask(url)) for url in urls]
    try:
        for ended in asyncio.as_completed(tasks):
            served = await ended
            if served and can_serve([url for url, one in found.items() if one.root == served.root]):
                return served
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if first := next((found[url] for url in urls if url in found), None):
        return first
    raise Unavailable("; ".join(reasons))


def read_cards(url: str, answer: dict[str, object]) -> ServedModel:
    """Return the model of /v1/models: the first, before its adapters. Raises Incompatible."""
    cards = answer.get("data")
    if not isinstance(cards, list) or not cards or not isinstance(cards[0], dict) or "id" not in cards[0]:
        raise Incompatible(f"{url}/v1/models names no model: {str(cards)[:200]}")
    root = str(cards[0].get("root") or cards[0]["id"])
    names = tuple(str(card["id"]) for card in cards if isinstance(card, dict) and card.get("root", root) == root)
    return ServedModel(root, names, int(cards[0].get("max_model_len") or 0))
