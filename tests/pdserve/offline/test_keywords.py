"""The keywords of LLM: ours, vLLM's, and unknown ones."""

from pathlib import Path
from typing import Any

import pytest

from pdserve import LLM, EngineArgs
from pdserve.flags.row import Arity, FlagVerdict
from pdserve.flags.table import find
from pdserve.offline.keywords import DECIDED, as_keywords, fill_model, read_keywords, without_effect_on_cluster
from wire.errors import ConfigError


def test_every_flag_is_a_keyword_and_vllms_are_translated(capsys: pytest.CaptureFixture[str]) -> None:
    reported = read_keywords(
        "m",
        {
            "dtype": "half", "max_model_len": 128, "kv_cache_memory": "16MiB", "gpu_memory_utilization": 0.5,
            "enable_prefix_caching": False, "swap_space": 1, "served_model_name": ["a", "b"], "quantization": None,
            "max_logprobs": -1, "default_chat_template_kwargs": {"think": True},
        },
    )  # fmt: skip

    engine, scheduler = reported.engine, reported.scheduler
    assert (engine.model, engine.dtype, engine.max_model_len, engine.kv_cache_memory) == ("m", "float16", 128, 2**24)
    assert (engine.gpu_memory_utilization, engine.enable_prefix_caching, engine.swap_bytes) == (0.5, False, 2**30)
    assert (engine.served_model_name, engine.quantization) == (("a", "b"), None)
    assert (scheduler.max_logprobs, scheduler.chat_settings(keyed=False).default_kwargs) == (-1, {"think": True})
    assert capsys.readouterr().err == ""


def test_keywords_without_effect_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    read_keywords("m", {"use_v2_block_manager": True, "trust_remote_code": False, "disable_log_stats": True})
    output = capsys.readouterr().err

    assert output.startswith("without effect: use_v2_block_manager (there is one kind of KV pool)")
    assert output.count("\n") == 1
    assert "trust_remote_code" not in output, "False has no effect"
    assert "--" not in output


def test_every_keyword_of_vllms_own_class_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """As declared by LLM of vLLM 0.32 (entrypoints/llm.py), with its defaults, and those of earlier versions."""
    given = {
        "runner": "auto", "convert": "auto", "tokenizer": None, "tokenizer_mode": "auto", "skip_tokenizer_init": False,
        "trust_remote_code": False, "allowed_local_media_path": None, "allowed_media_domains": None,
        "tensor_parallel_size": 1, "dtype": "auto", "quantization": None, "revision": None, "tokenizer_revision": None,
        "chat_template": None, "gpu_memory_utilization": 0.92, "cpu_offload_gb": 0, "offload_group_size": 0,
        "offload_num_in_group": 1, "offload_prefetch_step": 1, "offload_params": None, "enforce_eager": False,
        "enable_return_routed_experts": False, "return_sampling_mask": False, "disable_custom_all_reduce": False,
        "hf_token": None, "hf_overrides": None, "mm_processor_kwargs": None, "pooler_config": None,
        "structured_outputs_config": {"backend": "xgrammar"}, "profiler_config": None, "attention_config": None,
        "kv_cache_memory_bytes": 2**24, "compilation_config": None, "quantization_config": None,
        "logits_processors": None, "spec_method": None, "spec_model": None, "spec_tokens": None,
        "renderer_num_workers": 2, "async_scheduling": False, "speculative_config": None, "load_format": "auto",
        "config_format": "auto", "enable_prompt_embeds": False, "enable_sleep_mode": False, "additional_config": None,
        "swap_space": 4, "max_seq_len_to_capture": 8192, "disable_async_output_proc": False,
    }  # fmt: skip
    reported = read_keywords("m", given)

    assert reported.engine.kv_cache_memory == 2**24
    assert capsys.readouterr().err.startswith("without effect: runner (")


ENGINE_ARGS = [
    "model", "enable_return_routed_experts", "return_sampling_mask", "model_weights", "served_model_name",
    "tokenizer", "hf_config_path", "runner", "convert", "skip_tokenizer_init", "enable_prompt_embeds",
    "tokenizer_mode", "trust_remote_code", "allowed_local_media_path", "allowed_media_domains", "download_dir",
    "safetensors_load_strategy", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size",
    "load_format", "config_format", "dtype", "kv_cache_dtype", "seed", "max_model_len",
    "cudagraph_capture_sizes", "max_cudagraph_capture_size", "ir_op_priority", "distributed_executor_backend",
    "pipeline_parallel_size", "master_addr", "master_port", "nnodes", "node_rank",
    "distributed_timeout_seconds", "cpu_distributed_timeout_seconds", "numa_bind", "numa_bind_nodes",
    "numa_bind_cpus", "device_ids", "tensor_parallel_size", "prefill_context_parallel_size",
    "decode_context_parallel_size", "dcp_comm_backend", "dcp_q_replicate", "dcp_kv_cache_interleave_size",
    "cp_kv_cache_interleave_size", "data_parallel_size", "data_parallel_rank", "data_parallel_start_rank",
    "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port", "data_parallel_hybrid_lb",
    "data_parallel_external_lb", "data_parallel_multi_port_external_lb", "data_parallel_backend",
    "enable_hc_sp", "enable_expert_parallel", "enable_batch_sharded_sampling", "enable_ep_weight_filter",
    "moe_backend", "linear_backend", "sparse_indexer_topk_backend", "all2all_backend", "enable_elastic_ep",
    "elastic_ep_max_dp_size", "enable_dbo", "ubatch_size", "dbo_decode_token_threshold", "dp_sync_interval",
    "dbo_prefill_token_threshold", "disable_nccl_for_dp_synchronization", "eplb_config", "enable_eplb",
    "expert_placement_strategy", "_api_process_count", "_api_process_rank", "max_parallel_loading_workers",
    "block_size", "enable_prefix_caching", "prefix_caching_hash_algo", "prefix_cache_retention_interval",
    "disable_sliding_window", "disable_cascade_attn", "offload_backend", "cpu_offload_gb", "cpu_offload_params",
    "offload_group_size", "offload_num_in_group", "offload_prefetch_step", "offload_params",
    "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_scheduled_tokens",
    "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "max_num_seqs",
    "max_num_active_seqs", "max_num_queued_reqs", "max_num_queued_tokens", "max_logprobs", "logprobs_mode",
    "use_fp64_gumbel", "enable_trace_replay", "disable_log_stats", "aggregate_engine_logging", "revision",
    "code_revision", "hf_token", "hf_overrides", "model_class_overrides", "tokenizer_revision", "quantization",
    "quantization_config", "allow_deprecated_quantization", "enforce_eager", "disable_custom_all_reduce",
    "enable_shm_tensor_arena", "language_model_only", "limit_mm_per_prompt", "enable_mm_embeds",
    "interleave_mm_strings", "media_io_kwargs", "mm_processor_kwargs", "mm_processor_cache_gb",
    "mm_processor_cache_type", "mm_hasher_algorithm", "mm_shm_cache_max_object_size_mb", "mm_encoder_only",
    "mm_encoder_tp_mode", "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
    "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin", "io_processor_plugin",
    "renderer_num_workers", "skip_mm_profiling", "video_pruning_rate", "video_pruning_method", "mm_tensor_ipc",
    "mm_processor_device", "mm_ipc_gpu_memory_gb", "mm_device_do_normalize", "enable_lora", "max_loras",
    "max_lora_rank", "default_mm_loras", "fully_sharded_loras", "max_cpu_loras", "lora_dtype",
    "lora_target_modules", "enable_tower_connector_lora", "specialize_active_lora",
    "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "max_lora_cls_labels", "ray_workers_use_nsight",
    "num_gpu_blocks_override", "model_loader_extra_config", "ignore_patterns", "enable_chunked_prefill",
    "disable_chunked_mm_input", "scheduler_reserve_full_isl", "prefill_schedule_interval", "watermark",
    "disable_hybrid_kv_cache_manager", "structured_outputs_config", "aux_output_config", "reasoning_parser",
    "reasoning_parser_plugin", "speculative_config", "spec_method", "spec_model", "spec_tokens",
    "watermark_config", "diffusion_config", "show_hidden_metrics_for_version", "otlp_traces_endpoint",
    "collect_detailed_traces", "per_request_spec_decode_metrics", "kv_cache_metrics", "kv_cache_metrics_sample",
    "custom_histogram_buckets", "cudagraph_metrics", "enable_layerwise_nvtx_tracing", "enable_mfu_metrics",
    "enable_logging_iteration_details", "jit_monitor_mode", "jit_monitor_verbose", "enable_mm_processor_stats",
    "scheduling_policy", "scheduler_cls", "pooler_config", "compilation_config", "attention_config",
    "engram_config", "mamba_config", "kernel_config", "enable_flashinfer_autotune", "monokernel", "worker_cls",
    "worker_extension_cls", "profiler_config", "logging_config", "log_level", "log_config_file",
    "kv_transfer_config", "kv_events_config", "ec_transfer_config", "ec_manager_config", "reasoning_config",
    "generation_config", "enable_sleep_mode", "sleep_mode_backend", "sleep_mode_offload_cudagraph",
    "sleep_preserve_parameter_names", "enable_cumem_allocator", "enable_nccl_comm_suspend",
    "override_generation_config", "model_impl", "attention_backend", "kv_cache_dtype_skip_layers",
    "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size", "prefix_match_unit", "mamba_cache_mode",
    "enable_mamba_shared_prefix_checkpoint", "replayssm_buffer_len", "use_replayssm", "mamba_backend",
    "mamba_ssu_algorithm", "enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds",
    "additional_config", "use_tqdm_on_load", "pt_load_map_location", "logits_processors", "async_scheduling",
    "stream_interval", "kv_sharing_fast_prefill", "swa_bounded_replay", "optimization_level",
    "performance_mode", "fault_tolerance_config", "enable_fault_tolerance", "kv_offloading_size",
    "kv_offloading_backend", "tokens_only", "shutdown_timeout", "watchdog_config", "weight_transfer_config",
    "fail_on_environ_validation", "gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend",
]  # fmt: skip
"""The names of EngineArgs' fields in the wheel vllm 0.33.0."""


@pytest.mark.parametrize("name", ENGINE_ARGS)
def test_each_engine_args_field_is_accepted_or_refused_with_a_reason(name: str) -> None:
    row = find("--" + name.replace("_", "-"))
    value: Any = True if row is not None and row.arity in (Arity.NOTHING, Arity.MAYBE) else ["m"]

    assert EngineArgs(**{name: None}).keywords().get(name) is None or name in ("model", "seed")
    if name in DECIDED or (row is not None and row.verdict is FlagVerdict.REFUSED):
        with pytest.raises(ConfigError, match=rf"^{name} is (refused: \w+|for servers)"):
            read_keywords("m", {name: value})
    elif row is not None and row.verdict is FlagVerdict.NO_EFFECT:
        read_keywords("m", {name: list(row.only[:1]) or value})
    else:
        read_keywords("m", {name: None})


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"gpu_memory_utilisation": 0.5}, TypeError, "did you mean gpu_memory_utilization?"),
        ({"max_length": 5}, TypeError, "LLM has no keyword 'max_length'"),
        ({"hf_overrides": {"a": 1}}, ConfigError, "is not a JSON object with matryoshka_dimensions"),
        ({"dtype": "int3"}, ConfigError, "dtype"),
        ({"max_model_len": "long"}, ConfigError, "max_model_len"),
        ({"port": 8000}, ConfigError, "port is for servers: leave it out for LLM"),
        ({"tokenizer": "other"}, ConfigError, "tokenizer other is refused"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_invalid_values_are_refused_by_keyword(keywords: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as refused:
        read_keywords("m", keywords)

    assert words in str(refused.value)
    assert "--" not in str(refused.value)


def test_a_command_in_a_message_keeps_its_flags() -> None:
    assert as_keywords("argument --device: --device-ids 3: make an environment by scripts/install --device cuda") == (
        "device: device_ids 3: make an environment by scripts/install --device cuda"
    )


def test_a_step_holds_the_models_length_as_in_a_server(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = fill_model(read_keywords(str(model), {"max_num_batched_tokens": 64}))

    assert config.engine.max_num_batched_tokens == 512
    assert "64 is below the maximum length: using 512" in capsys.readouterr().err


def test_engine_keywords_have_no_effect_on_a_running_cluster() -> None:
    assert without_effect_on_cluster({"dtype": "float32", "max_model_len": None}) == (
        "without effect on a running cluster, which has its own settings: dtype"
    )
    assert without_effect_on_cluster({}) is None
    with pytest.raises(TypeError, match="did you mean dtype"):
        without_effect_on_cluster({"dtyp": "float32"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cluster": "http://x", "prefill": 1}, "pass either cluster or these two"),
        ({"api_key": "k"}, "api_key is for a cluster"),
        ({"max_in_flight": 0}, "max_in_flight is 0, but must be 1 or more"),
    ],
)  # fmt: skip
def test_arguments_that_exclude_each_other_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM("m", **arguments)


def test_a_folder_without_a_model_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        LLM(str(tmp_path))
