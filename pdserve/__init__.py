"""The public Python API of pdserve.

`from pdserve import LLM, SamplingParams`: each name is imported on first use; only a local engine imports torch.
"""

from pdserve.package_finder import claim

TYPE_CHECKING = False  # importing typing takes 2 ms, during which no command handles Ctrl-C yet
if TYPE_CHECKING:
    from pdserve.offline.engine_args import EngineArgs, FlexibleArgumentParser
    from pdserve.offline.flat_logprobs import FlatLogprobs
    from pdserve.offline.llm import LLM
    from pdserve.offline.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from pdserve.offline.printing import print_embeddings
    from pdserve.offline.prompts import TextPrompt, TokensPrompt
    from pdserve.offline.request_stats import RequestStateStats
    from pdserve.offline.sampling_params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
    )
    from pdserve.offline.structured_params import GuidedDecodingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence", "ClassificationOutput",
    "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "EngineArgs",
    "FlatLogprobs", "FlexibleArgumentParser", "GuidedDecodingParams", "Logprob", "PoolingOutput",
    "PoolingRequestOutput", "RepetitionDetectionParams", "RequestOutput", "RequestOutputKind", "RequestStateStats",
    "SamplingParams", "ScoringOutput", "ScoringRequestOutput", "StructuredOutputsParams", "TextPrompt", "TokensPrompt",
    "print_embeddings",
]  # fmt: skip

_FILES = {
    "EngineArgs": "engine_args", "FlexibleArgumentParser": "engine_args", "FlatLogprobs": "flat_logprobs",
    "LLM": "llm", "print_embeddings": "printing", "RequestStateStats": "request_stats",
    "BeamSearchParams": "sampling_params", "RepetitionDetectionParams": "sampling_params",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "GuidedDecodingParams": "structured_params", "StructuredOutputsParams": "structured_params",
    "TextPrompt": "prompts", "TokensPrompt": "prompts",
}  # fmt: skip

claim()


def __getattr__(name: str) -> object:
    if name not in __all__:
        from pdserve.offline.unsupported import NAMES

        if name in NAMES:
            raise ImportError(f"pdserve has no {name}: {NAMES[name]}", name=name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"pdserve.offline.{_FILES.get(name, 'outputs')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
