"""Load the engine of an encoder or a classifier, which generates no text: it returns vectors, scores or classes."""

import time
from collections.abc import Callable
from pathlib import Path

from devices.table import choose
from engine.checkpoints.model_identity import check_folder, identify, name_of, read_json
from engine.interface import Engine
from engine.torch_start import loading, prepare_torch
from engine.watched import OnLost, guard_of
from instance.config import InstanceConfig
from wire.errors import ConfigError


def may_be_encoder(model: str) -> bool:
    """Return whether config.json names an architecture that encoders can have: cheap, without transformers.

    Raises ConfigError for a folder that is not a model's.
    """
    check_folder(Path(model))
    named = read_json(Path(model) / "config.json").get("architectures") or [""]
    return not str(named[0]).endswith(("ForCausalLM", "LMHeadModel"))


def load_encoder_engine(
    config: InstanceConfig, on_lost: OnLost, on_read: Callable[[], None] = lambda: None
) -> tuple[Engine, tuple[str, ...]] | None:  # fmt: skip
    """Return the engine with notes for the user, or None where the model is a decoder. Raises ConfigError.

    `on_lost` is called when the engine's device is lost, `on_read` when reading the weights begins.
    """
    options, path = config.options, Path(config.options.model)
    num_threads = config.num_threads
    prepare_torch(num_threads)
    with loading():
        import torch

        from engine.pooling.core import EncoderCore
        from engine.pooling.encoder import is_encoder, load_encoder

        if not is_encoder(path):
            return None
        if config.num_ranks > 1:
            raise ConfigError(f"{path}: an encoder runs on one device, not on {config.num_ranks}")
        torch.set_num_threads(num_threads)
        choice = choose(options.device)
        device = choice.kind.open()
        on_read()
        encoder, notes = load_encoder(
            path, dtype=options.dtype, max_model_len=options.max_model_len, device=device
        )  # fmt: skip
        core = EncoderCore(
            encoder, identify(path, name_of(path)), block_size=config.block_size(device.name),
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens(encoder.info.max_length), clock=time.monotonic,
            guard=guard_of(device, on_lost, options.rank_timeout),
        )  # fmt: skip
    return core, (f"{choice.reason} ({device.describe()})", *notes)
