"""Build an instance's parts from its config: the engine over a real or the fake model, the KV sender and receiver."""

import importlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from devices.table import choose
from engine.core import EngineCore
from engine.interface import Engine
from engine.prefix import why_no_names
from engine.step import Model
from engine.torch_start import loading, prepare_torch
from engine.watched import watched
from instance.config import InstanceConfig
from instance.encoders import load_encoder_engine, may_be_encoder
from instance.far_ranks import connect_ranks, transfer_settings
from instance.host import Identity, InstanceHost
from instance.offered_transports import check_named, warn_of_copies, warn_of_settings, warn_of_slow_set_up
from instance.ranks import ranks_model
from kvtransfer.all_ranks import make_receiver, make_sender
from kvtransfer.interface import PoolMemory, SenderEvents
from kvtransfer.mover import process_mover
from kvtransfer.quorum import Quorum
from kvtransfer.rank_ends import RankReceiver, RankSender
from processes.failpoints import process_failpoints
from telemetry.logs import EventLogger
from telemetry.start_marks import GRAPHS, WEIGHTS
from wire.errors import ConfigError, PdserveError
from wire.types import Role

_log = EventLogger("instance")
FAKE_ENGINE = "testing.instance.fake_engine"
"""The module of `--engine fake`, loaded by this name: the product imports no fake."""

OnStage = Callable[[str], None]
"""Called when a stage of the load begins, with its mark: WEIGHTS, or GRAPHS."""


def build_engine(
    config: InstanceConfig, on_lost: Callable[[PdserveError], None], on_stage: OnStage = lambda _: None
) -> tuple[Engine, tuple[str, ...]]:  # fmt: skip
    """Load the model and build its engine; return it with notes for the log. Blocks for a long time.

    `on_lost` is called, from any thread, when the device or one of the ranks is lost: no step can run after that.
    """
    if config.options.engine != "fake" and may_be_encoder(config.options.model):
        encoder = load_encoder_engine(config, on_lost, lambda: on_stage(WEIGHTS))
        if encoder is not None:
            return encoder
    model, notes = _load(config, on_lost, on_stage)
    options, max_model_len = config.options, model.info.max_model_len
    if options.max_model_len is not None and options.max_model_len > max_model_len:
        raise ConfigError(f"--max-model-len {options.max_model_len} exceeds the model's {max_model_len}")
    core = EngineCore(
        model,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens(max_model_len),
        prefill_chunk_size=config.prefill_chunk_size(model.info.device),
        prefix_caching=options.enable_prefix_caching,
        reuse_decoded=options.reuse_decoded,
        swap_bytes=options.swap_bytes,
        gap_limit_s=options.gap_limit,
        clock=time.monotonic,
    )
    return core, (*notes, *_cache_notes(options.enable_prefix_caching, model.info.layout.block_size))


def connect_handoff(config: InstanceConfig, engine: Engine, identity: Identity, host: InstanceHost) -> None:
    """Open the KV listeners and start the instance's threads."""
    check_named(config.options.kv_transport, engine.memories[0])
    if config.role is not Role.COMBINED:  # a combined instance hands nothing off
        warn_of_copies(config.options.kv_transport, engine.memories[0])
        warn_of_slow_set_up(config.options.kv_transport, engine.memories[0])
    warn_of_settings(config.options.kv_transport, engine.memories[0], config.num_ranks, os.environ)
    _log.info("kv_mover", name=process_mover().name)
    settings = transfer_settings(config, identity)
    far = connect_ranks(engine.memories, settings, config.trust)
    if not far:  # only the ranks' sums on a device can block a link's operations
        settings = replace(settings, step_s=math.inf)

    def receive(memory: PoolMemory, quorum: Quorum) -> RankReceiver:
        rank = far.get(memory.layout.rank)
        return settings.receiver(memory, quorum, config.trust) if rank is None else rank.receiver(quorum)

    def send(memory: PoolMemory, events: SenderEvents) -> RankSender:
        rank = far.get(memory.layout.rank)
        if rank is not None:
            return rank.sender(events)
        return settings.sender(memory, events, config.trust, host.loop.progress_age)

    receiver = make_receiver(engine.memories, host.workers.decode, process_failpoints(), receive)
    sender = make_sender(engine.memories, host.workers.prefill, send)
    host.start(sender, receiver)


def _cache_notes(wanted: bool, block_size: int) -> tuple[str, ...]:
    reason = why_no_names(block_size) if wanted else None
    return () if reason is None else (f"the prefix cache is off: {reason}",)


def _load(
    config: InstanceConfig, on_lost: Callable[[PdserveError], None], on_stage: OnStage
) -> tuple[Model, tuple[str, ...]]:  # fmt: skip
    if config.options.engine == "fake":
        on_stage(WEIGHTS)
        return _fake_model(config)
    if config.num_ranks == 1:
        return _torch_model(config, on_lost, on_stage)
    on_stage(WEIGHTS)  # each rank reads them in its own process
    return ranks_model(config, on_lost, lambda: on_stage(GRAPHS))


def _torch_model(
    config: InstanceConfig, on_lost: Callable[[PdserveError], None], on_stage: OnStage
) -> tuple[Model, tuple[str, ...]]:  # fmt: skip
    options = config.options
    num_threads = config.num_threads
    prepare_torch(num_threads)
    with loading():
        choice = choose(options.device)
        device = choice.kind.open()
        from engine.fused.area import VARIABLE as WEIGHTS_FD
        from engine.headroom import LargestStep
        from engine.loader import load_model

        loaded = load_model(
            Path(options.model),
            dtype=options.dtype,
            block_size=config.block_size(device.name),
            kv_cache_memory=options.kv_cache_memory,
            num_threads=num_threads,
            attention_backend=options.attention_backend,
            max_model_len=options.max_model_len,
            quantization=options.quantization,
            device=device,
            gpu_memory_utilization=options.gpu_memory_utilization,
            max_graph_rows=0 if options.enforce_eager else options.max_num_seqs,
            largest_step=LargestStep(config.prefill_chunk_size(device.name), options.max_num_seqs),
            step_s=options.rank_timeout,
            on_read=lambda: on_stage(WEIGHTS),
            on_capture=lambda: on_stage(GRAPHS),
            weights_fd=os.environ.get(WEIGHTS_FD, ""),
        )
    model = watched(loaded.model, device, on_lost, options.rank_timeout)
    return model, (f"{choice.reason} ({device.describe()})", *loaded.notes)


def _fake_model(config: InstanceConfig) -> tuple[Model, tuple[str, ...]]:
    return importlib.import_module(FAKE_ENGINE).fake_model(config), (
        "--engine fake: tokens are arithmetic, not a model's",
    )
