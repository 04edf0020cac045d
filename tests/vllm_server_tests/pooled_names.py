"""vLLM's names for vectors and scores: the shapes of answers, binary numbers, and references by transformers."""

import sys
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel
from torch.nn.functional import cosine_similarity, normalize
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from tests.vllm_server_tests.models import model_folder

DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "f4"),
    "float16": (torch.float16, "f2"),
    "bfloat16": (torch.bfloat16, "u2"),
    "fp8_e4m3": (torch.float8_e4m3fn, "u1"),
    "fp8_e5m2": (torch.float8_e5m2, "u1"),
}
"""The torch dtype of each spelling, and numpy's of the same size."""
ENDIANNESS = ("native", "big", "little")


class _Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0  # null in none


class _Answer(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: _Usage


class _Embedding(BaseModel):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingResponse(_Answer):
    """Of /v1/embeddings."""

    data: list[_Embedding]


class _Pooled(BaseModel):
    index: int
    object: Literal["pooling"]
    data: list[list[float]] | list[float] | str


class PoolingResponse(_Answer):
    """Of /pooling."""

    data: list[_Pooled]


class _Class(BaseModel):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(_Answer):
    """Of /classify."""

    data: list[_Class]


class _Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(_Answer):
    """Of /score."""

    data: list[_Score]


class _Document(BaseModel):
    text: str | None = None


class _Ranked(BaseModel):
    index: int
    document: _Document
    relevance_score: float


class _RankUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(BaseModel):
    """Of /rerank."""

    id: str
    model: str
    usage: _RankUsage
    results: list[_Ranked]


@dataclass(frozen=True, slots=True)
class EmbedModelInfo:
    """A model of vectors."""

    name: str
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] | None = None


@dataclass(frozen=True, slots=True)
class MetadataItem:
    """Where the numbers of one input are in a body of bytes."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: tuple[int, ...]


def build_metadata_items(embed_dtype: str, endianness: str, shape: tuple[int, ...], n_request: int) -> list[Any]:
    """Return the items of inputs that lie one after the other."""
    size = int(np.prod(shape)) * DTYPES[embed_dtype][0].itemsize
    return [MetadataItem(at, embed_dtype, endianness, at * size, at * size + size, shape) for at in range(n_request)]


def decode_pooling_output(items: list[MetadataItem], body: bytes) -> list[torch.Tensor]:
    """Return the numbers of each item."""
    return [binary2tensor(body[one.start : one.end], one.shape, one.embed_dtype, one.endianness) for one in items]


def binary2tensor(binary: bytes, shape: tuple[int, ...], embed_dtype: str, endianness: str) -> torch.Tensor:
    """Return the numbers."""
    dtype, spelled = DTYPES[embed_dtype]
    numbers = np.frombuffer(bytearray(binary), dtype=spelled).reshape(shape)
    if endianness not in ("native", sys.byteorder):
        numbers = numbers.byteswap()
    return torch.from_numpy(numbers.view("i2") if spelled == "u2" else numbers).view(dtype)


def check_embeddings_close(
    *, embeddings_0_lst: Any, embeddings_1_lst: Any, name_0: str, name_1: str, tol: float = 1e-3
) -> None:
    """Fail unless the vectors point the same way."""
    for one, other in zip(embeddings_0_lst, embeddings_1_lst, strict=True):
        cosine = cosine_similarity(torch.as_tensor(one), torch.as_tensor(other), dim=0)
        assert cosine >= 1 - tol, f"{name_0} and {name_1} have the cosine {cosine:.4f}"


def float_embeddings(response: EmbeddingResponse) -> list[Any]:
    """Return the vectors."""
    return [one.embedding for one in response.data]


def run_embedding_correctness_test(
    hf_model: "HfRunner", inputs: list[str], vllm_outputs: Any, dimensions: int | None = None
) -> None:
    """Fail unless these are transformers' vectors."""
    wanted = normalize(hf_model.encode(inputs)[:, :dimensions], dim=1)
    check_embeddings_close(
        embeddings_0_lst=wanted, embeddings_1_lst=vllm_outputs, name_0="transformers", name_1="here", tol=1e-2
    )


class HfRunner:
    """transformers over the weights of the model that stands for one, in float32."""

    def __init__(self, name: str, *, is_cross_encoder: bool = False, **settings: Any) -> None:
        folder = model_folder(name)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        kind = AutoModelForSequenceClassification if is_cross_encoder else AutoModel
        self._network = kind.from_pretrained(folder, dtype=torch.float32).eval()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    @torch.no_grad()
    def encode(self, texts: list[str]) -> torch.Tensor:
        """Return the mean of the hidden states of each text."""
        found = [self._network(self._ids(text)).last_hidden_state[0].mean(0) for text in texts]
        return torch.stack(found)

    @torch.no_grad()
    def predict(self, pairs: list[list[str]]) -> torch.Tensor:
        """Return the score of each pair."""
        return torch.cat([torch.sigmoid(self._network(self._ids(*pair)).logits[0]) for pair in pairs])

    def _ids(self, *texts: str) -> torch.Tensor:
        return torch.tensor([self._tokenizer.encode(*texts)])


class EncoderScoringHfRunner(HfRunner):
    """The cosines of transformers' vectors."""

    def predict(self, pairs: list[list[str]]) -> torch.Tensor:
        """Return the score of each pair."""
        return torch.stack([cosine_similarity(*self.encode(pair).unsqueeze(1))[0] for pair in pairs])


NAMES: dict[str, Any] = {
    "tests.conftest.HfRunner": HfRunner,
    "tests.entrypoints.pooling.scoring.util.EncoderScoringHfRunner": EncoderScoringHfRunner,
    "tests.models.language.pooling.embed_utils.float_embeddings": float_embeddings,
    "tests.models.language.pooling.embed_utils.run_embedding_correctness_test": run_embedding_correctness_test,
    "tests.models.utils.EmbedModelInfo": EmbedModelInfo,
    "tests.models.utils.check_embeddings_close": check_embeddings_close,
    "vllm.entrypoints.pooling.classify.protocol.ClassificationResponse": ClassificationResponse,
    "vllm.entrypoints.pooling.embed.protocol.EmbeddingResponse": EmbeddingResponse,
    "vllm.entrypoints.pooling.pooling.protocol.PoolingResponse": PoolingResponse,
    "vllm.entrypoints.pooling.scoring.protocol.RerankResponse": RerankResponse,
    "vllm.entrypoints.pooling.scoring.protocol.ScoreResponse": ScoreResponse,
    "vllm.entrypoints.pooling.utils.MetadataItem": MetadataItem,
    "vllm.entrypoints.pooling.utils.build_metadata_items": build_metadata_items,
    "vllm.entrypoints.pooling.utils.decode_pooling_output": decode_pooling_output,
    "vllm.utils.serial_utils.EMBED_DTYPES": DTYPES,
    "vllm.utils.serial_utils.ENDIANNESS": ENDIANNESS,
    "vllm.utils.serial_utils.binary2tensor": binary2tensor,
}
