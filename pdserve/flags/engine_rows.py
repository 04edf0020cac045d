"""vLLM's 0.5 and 0.6 engine flags: model, memory, batches, ranks."""

from collections.abc import Callable, Mapping
from typing import Final

from pdserve.flags.row import Arity, VllmFlag, no_effect, refused, supported
from wire.errors import ConfigError

_NOTHING, _MAYBE = Arity.NOTHING, Arity.MAYBE
_DTYPES: Final[Mapping[str, str]] = {"half": "float16", "float": "float32"}
_KERNELS: Final[Mapping[str, str]] = {"awq_marlin": "awq", "gptq_marlin": "gptq", "marlin": "gptq"}

_ONE_KIND = "only the needed files are downloaded"
_IN_CONFIG = "set it in the model's config.json"
_GRAPHS = "graphs are captured for every length"
_STEPS = "each step is one forward pass"
_ONE_POOL = "there is one kind of KV pool"
_FAST_TOKENS = "the scheduler tokenises in its own threads"
_TP_ALONE = "only --tensor-parallel-size splits an instance"


def _bytes_of_gib(flag: str) -> Callable[[str], str]:
    """Return a converter of a number of GiB to bytes. It raises ConfigError."""

    def convert(text: str) -> str:
        try:
            num_bytes = int(float(text) * 2**30)
        except (ValueError, OverflowError):
            raise ConfigError(f"{flag} {text!r} is not a number of GiB, such as 4") from None
        if num_bytes < 0:
            raise ConfigError(f"{flag} {text} is below 0")
        return str(num_bytes)

    return convert


MODEL_FLAGS: Final = (
    supported("--model", why="a folder, or a name on the Hugging Face hub or ModelScope: docs/models.md"),
    supported("--revision"),
    supported("--download-dir"),
    supported("--served-model-name", Arity.MANY),
    supported("--dtype", convert=lambda text: _DTYPES.get(text, text), why="half is float16, float is float32"),
    supported(
        "--quantization", short="-q", convert=lambda text: _KERNELS.get(text, text),
        why="gptq_marlin and awq_marlin mean gptq and awq: the device determines the kernel",
    ),
    supported("--max-model-len"),
    supported("--device"),
    no_effect("--tokenizer", "the tokenizer is the model folder's: omit it, or pass --model's folder"),
    no_effect("--tokenizer-mode", "the tokenizer.json of the model is used", only=("auto",)),
    no_effect(
        "--load-format", "safetensors, .bin and GGUF are detected, in this order",
        only=("auto", "safetensors", "gguf", "pt"),
    ),
    no_effect("--config-format", "the model's config.json is read", only=("auto", "hf")),
    no_effect("--kv-cache-dtype", "KV is kept in the model's dtype", only=("auto",)),
    no_effect("--trust-remote-code", "a model's own code is never run", _NOTHING),
    no_effect("--code-revision", "a model's own code is never run"),
    no_effect("--ignore-patterns", _ONE_KIND),
    no_effect("--task", "the task is read from the model's config", only=("auto", "generate", "embed", "score")),
    supported("--generation-config"),
    no_effect("--seed", "a request without a seed of its own gets a random one"),
    refused("--skip-tokenizer-init", "the scheduler needs the tokenizer", _NOTHING),
    refused("--tokenizer-revision", "--revision selects the tokenizer too"),
    refused("--rope-scaling", _IN_CONFIG),
    refused("--rope-theta", _IN_CONFIG),
    supported("--hf-overrides", why="only `matryoshka_dimensions` and `is_matryoshka`; set others in config.json"),
    refused("--disable-sliding-window", "the window is part of the model: set --max-model-len to its size", _NOTHING),
    refused("--quantization-param-path", "KV is kept in the model's dtype, without scales"),
    refused("--model-loader-extra-config", "the loader has no settings"),
    refused("--qlora-adapter-name-or-path", "adapters are not supported: merge the adapter into the weights"),
    refused("--logits-processor-pattern", "Python logits processors are not supported"),
    refused("--override-neuron-config", "there is no Neuron backend"),
    refused("--override-pooler-config", "the model's config defines the pooler"),
)  # fmt: skip

MEMORY_FLAGS: Final = (
    supported("--block-size"),
    supported("--enable-prefix-caching", _NOTHING),
    supported("--gpu-memory-utilization"),
    supported(
        "--swap-space", our_name="--swap-bytes", convert=_bytes_of_gib("--swap-space"),
        why="GiB; --swap-bytes also accepts 512MiB",
    ),
    supported(
        "--mm-processor-cache-gb", our_name="--image-cache-bytes", convert=_bytes_of_gib("--mm-processor-cache-gb"),
        why="GiB of image embeddings; --image-cache-bytes also accepts 512MiB",
    ),
    no_effect("--use-v2-block-manager", _ONE_POOL, _NOTHING),
    no_effect("--num-lookahead-slots", _ONE_POOL),
    no_effect("--preemption-mode", "KV is swapped, and recomputed when swap is full"),
    no_effect("--cpu-offload-gb", "weights stay on their device", only=("0", "0.0")),
    refused("--num-gpu-blocks-override", "set the memory instead: --kv-cache-memory 4GiB"),
)  # fmt: skip

BATCH_FLAGS: Final = (
    no_effect("--disable-log-stats", "statistics are on /metrics, not in the log", _NOTHING),
    supported("--max-num-seqs"),
    supported("--max-num-batched-tokens"),
    no_effect(
        "--enable-chunked-prefill", "prompts are always prefilled in chunks of --prefill-chunk-size", _MAYBE,
        only=("true",),
    ),
    no_effect("--num-scheduler-steps", _STEPS),
    no_effect("--multi-step-stream-outputs", _STEPS, _MAYBE),
    no_effect("--scheduler-delay-factor", "a prompt never waits to be batched", only=("0", "0.0")),
    no_effect(
        "--scheduling-policy", "by priority, then first come, first served", only=("fcfs", "priority")
    ),
    supported("--enforce-eager", _NOTHING),
    no_effect("--max-context-len-to-capture", _GRAPHS),
    no_effect("--max-seq-len-to-capture", _GRAPHS),
    no_effect("--compilation-config", "nothing is compiled", short="-O"),
    no_effect("--disable-async-output-proc", "output is always handled the same way", _NOTHING),
    supported("--max-logprobs"),
    no_effect("--guided-decoding-backend", "llguidance compiles the grammars"),
    no_effect("--tokenizer-pool-size", _FAST_TOKENS),
    no_effect("--tokenizer-pool-type", _FAST_TOKENS),
    no_effect("--tokenizer-pool-extra-config", _FAST_TOKENS),
)  # fmt: skip

RANK_FLAGS: Final = (
    supported("--tensor-parallel-size", short="-tp"),
    no_effect("--pipeline-parallel-size", _TP_ALONE, only=("1",), short="-pp"),
    no_effect("--distributed-executor-backend", "ranks are processes on one host", only=("mp",)),
    no_effect("--max-parallel-loading-workers", "each rank reads only its own shard"),
    no_effect("--disable-custom-all-reduce", "the device's own collectives are used", _NOTHING),
    no_effect("--worker-cls", "a rank is a pdserve process", only=("auto",)),
    refused("--worker-use-ray", "ranks are processes on one host", _NOTHING),
    refused("--engine-use-ray", "an engine runs in its instance", _NOTHING),
    refused("--ray-workers-use-nsight", "ranks are not Ray workers", _NOTHING),
    refused("--kv-transfer-config", "the ranktable defines the roles, --kv-transport the transport"),
)

ENGINE_ROWS: Final[tuple[VllmFlag, ...]] = (*MODEL_FLAGS, *MEMORY_FLAGS, *BATCH_FLAGS, *RANK_FLAGS)
