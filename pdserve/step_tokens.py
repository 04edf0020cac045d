"""The guide's rule for --max-num-batched-tokens: at least the model's maximum context length."""

from flags.options import EngineOptions
from scheduler.model.files import read_model_files
from wire.errors import ConfigError


def check_step_tokens(options: EngineOptions) -> None:
    """Raise ConfigError when --max-num-batched-tokens is below the guide's minimum, the model's maximum length."""
    step, length = options.max_num_batched_tokens, options.max_model_len
    source = "--max-model-len"
    if length is None and options.model:
        length, source = read_model_files(options.model).max_model_len, "the model's maximum length"
    if step is not None and length is not None and step < length:
        raise ConfigError(
            f"--max-num-batched-tokens {step} is below {source} {length}: raise it, or lower --max-model-len"
        )
