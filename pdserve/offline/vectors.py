"""Vectors, classes and scores of texts."""

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.offline.bounded import bounded
from pdserve.offline.http_api import HttpApi
from pdserve.offline.lengths import token_ids
from pdserve.offline.outputs import EmbeddingOutput, EmbeddingRequestOutput, ScoringOutput, ScoringRequestOutput
from pdserve.offline.progress import ProgressBar
from pdserve.offline.prompts import PromptInput
from wire.errors import InvalidRequest

_PAIRS = 32  # per request


@dataclass(frozen=True, slots=True)
class PooledText:
    """A prompt's entry in the answer's `data`. `token_ids` is empty for a text that the server has truncated."""

    request_id: str
    entry: Mapping[str, Any]
    token_ids: list[int]


async def embed(
    api: HttpApi, prompts: Sequence[PromptInput], options: Mapping[str, Any], limit: int, progress: ProgressBar
) -> list[EmbeddingRequestOutput]:
    """Return the vector of each prompt, in order; `options` are fields of /v1/embeddings.

    Raises ValueError with the prompt's number.
    """
    fields = {"encoding_format": "base64", **options}
    return [
        EmbeddingRequestOutput(one.request_id, EmbeddingOutput(_decode_floats(one.entry["embedding"])), one.token_ids)
        for one in await read_texts(api, "/v1/embeddings", prompts, fields, limit, progress)
    ]


async def read_texts(
    api: HttpApi, path: str, prompts: Sequence[PromptInput], options: Mapping[str, Any], limit: int,
    progress: ProgressBar,
) -> list[PooledText]:  # fmt: skip
    """Return the result of the route `path` for each prompt, in order. Raises ValueError with the prompt's number."""

    async def read(indexed: tuple[int, PromptInput]) -> list[int]:
        try:
            return await token_ids(api, *indexed)
        except ValueError:
            if "truncate_prompt_tokens" not in options:
                raise
            return []  # too long to tokenise: the server truncates the text

    async def work(indexed: tuple[int, list[int]]) -> PooledText:
        index, ids = indexed
        try:
            answer = await api.post(path, {"input": [ids or prompts[index].text], **options})
        except InvalidRequest as error:
            raise ValueError(f"prompt {index}: {error}") from error
        progress.step(1)
        return PooledText(answer["id"], answer["data"][0], ids)

    ids = await bounded(list(enumerate(prompts)), read, limit)
    return await bounded(list(enumerate(ids)), work, limit)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Texts to compare: one left text with each right one, or pair by pair."""

    left: Sequence[str]
    right: Sequence[str]

    @classmethod
    def read(cls, left: str | Sequence[str], right: str | Sequence[str]) -> "Pairs":
        """Return the pairs. Raises ValueError if the numbers do not match."""
        lefts, rights = ([one] if isinstance(one, str) else list(one) for one in (left, right))
        if not lefts or not rights or len(lefts) not in (1, len(rights)):
            counts = f"the number of left texts is {len(lefts)}, but the number of right texts is {len(rights)}"
            raise ValueError(f"{counts}: pass one left text, or one for each right text")
        return cls(lefts, rights)

    def parts(self) -> list["Pairs"]:
        """Split the pairs into requests of _PAIRS."""
        starts = range(0, len(self.right), _PAIRS)
        cuts = [slice(start, start + _PAIRS) for start in starts]
        return [Pairs(self.left if len(self.left) == 1 else self.left[cut], self.right[cut]) for cut in cuts]


async def score(
    api: HttpApi, pairs: Pairs, options: Mapping[str, Any], limit: int, progress: ProgressBar
) -> list[ScoringRequestOutput]:
    """Return the score of each pair, in order. Raises ValueError for refused texts."""

    async def work(part: Pairs) -> list[ScoringRequestOutput]:
        try:
            answer = await api.post("/v1/score", {"text_1": part.left, "text_2": part.right, **options})
        except InvalidRequest as error:
            raise ValueError(str(error)) from error
        progress.step(len(part.right))
        return [
            ScoringRequestOutput(f"{answer['id']}-{one['index']}", ScoringOutput(one["score"]), [])
            for one in answer["data"]
        ]

    return [one for part in await bounded(pairs.parts(), work, limit) for one in part]


def _decode_floats(encoded: str) -> list[float]:
    """Decode base64 of little-endian float32."""
    numbers = array("f", base64.b64decode(encoded))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
