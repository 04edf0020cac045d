"""One tiny model, an LLM on it in this process, and transformers as the oracle."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve import LLM, RequestOutput, SamplingParams
from tests.conformance.served import Oracle
from tests.engine.tiny_models import make_tiny_model

ENGINE = {
    "dtype": "float32", "kv_cache_memory": "16MiB", "block_size": 16, "hf_overrides": {"is_matryoshka": True},
}  # fmt: skip
PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("offline") / "tiny-llama")


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    """transformers over the same weights."""
    return Oracle(model)


@pytest.fixture(scope="session")
def local(model: Path) -> Iterator[LLM]:
    """An engine in this process."""
    with LLM(str(model), **ENGINE) as llm:  # type: ignore[arg-type]
        yield llm


def ids(output: RequestOutput) -> list[int]:
    """Return the token ids of the first output."""
    return output.outputs[0].token_ids


def generated(llm: LLM) -> float:
    """The number of tokens that an LLM has generated."""
    return sum(getattr(one, "value", 0) for one in llm.get_metrics() if one.name == "vllm:generation_tokens_total")
