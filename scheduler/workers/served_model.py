"""Query running workers for the model that they serve."""

from collections.abc import Sequence
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


async def find_served_model(urls: Sequence[str], api_key: str) -> ServedModel:
    """Return what the first worker that answers serves. Raises Unavailable with each one's reason."""
    reasons = []
    for url in urls:
        http = WorkerHttp(url, api_key=api_key)
        try:
            return read_cards(url, await http.get_json("/v1/models", _TIMEOUT_S))
        except PdserveError as error:
            reasons.append(str(error))
        finally:
            await http.close()
    raise Unavailable("; ".join(reasons))


def read_cards(url: str, answer: dict[str, object]) -> ServedModel:
    """Return the model of /v1/models: the first, before its adapters. Raises Incompatible."""
    cards = answer.get("data")
    if not isinstance(cards, list) or not cards or not isinstance(cards[0], dict) or "id" not in cards[0]:
        raise Incompatible(f"{url}/v1/models names no model: {str(cards)[:200]}")
    root = str(cards[0].get("root") or cards[0]["id"])
    names = tuple(str(card["id"]) for card in cards if isinstance(card, dict) and card.get("root", root) == root)
    return ServedModel(root, names, int(cards[0].get("max_model_len") or 0))
