"""vLLM's 0.5 and 0.6 flags for adapters, draft models, images and traces."""

from collections.abc import Iterator, Sequence
from typing import Final

from pdserve.flags.row import Arity, VllmFlag, no_effect, refused, supported

_SWITCHES: Final = frozenset((
    "--enable-lora", "--fully-sharded-loras", "--enable-lora-bias", "--enable-prompt-adapter",
    "--speculative-disable-mqa-scorer", "--disable-image-processor",
))  # fmt: skip
_ADAPTERS: Final = (
    "--enable-lora", "--enable-lora-bias", "--max-loras", "--max-lora-rank", "--lora-extra-vocab-size", "--lora-dtype",
    "--long-lora-scaling-factors", "--max-cpu-loras", "--fully-sharded-loras", "--enable-prompt-adapter",
    "--max-prompt-adapters", "--max-prompt-adapter-token",
)  # fmt: skip
_DRAFTS: Final = (
    "--speculative-model", "--speculative-model-quantization", "--num-speculative-tokens",
    "--speculative-max-model-len", "--speculative-disable-by-batch-size", "--speculative-disable-mqa-scorer",
    "--ngram-prompt-lookup-max", "--ngram-prompt-lookup-min", "--spec-decoding-acceptance-method",
    "--typical-acceptance-sampler-posterior-threshold", "--typical-acceptance-sampler-posterior-alpha",
)  # fmt: skip
_IMAGES: Final = (
    "--image-input-type", "--image-token-id", "--image-input-shape", "--image-feature-size", "--image-processor",
    "--image-processor-revision", "--disable-image-processor", "--mm-processor-kwargs",
)  # fmt: skip


def _refused_rows(names: Sequence[str], why: str) -> Iterator[VllmFlag]:
    return (refused(name, why, Arity.NOTHING if name in _SWITCHES else Arity.ONE) for name in names)


ADAPTER_AND_TRACE_ROWS: Final[tuple[VllmFlag, ...]] = (
    *_refused_rows(_ADAPTERS, "adapters are not supported: merge them into the weights"),
    refused("--lora-modules", "adapters are not supported: merge them into the weights", Arity.MANY),
    refused("--prompt-adapters", "adapters are not supported", Arity.MANY),
    *_refused_rows(_DRAFTS, "there is no speculative decoding"),
    refused(
        "--speculative-draft-tensor-parallel-size", "there is no speculative decoding", short="-spec-draft-tp"
    ),
    refused("--disable-logprobs-during-spec-decoding", "there is no speculative decoding", Arity.MAYBE),
    *_refused_rows(_IMAGES, "the model's own image processor and tokens are used"),
    supported("--limit-mm-per-prompt"),
    supported("--enable-mm-embeds", Arity.NOTHING),
    supported("--allowed-local-media-path"),
    no_effect("--disable-mm-preprocessor-cache", "embeddings of images are always cached", Arity.NOTHING),
    supported("--otlp-traces-endpoint"),
    no_effect("--collect-detailed-traces", "every trace includes the stages of its prompts"),
)  # fmt: skip
