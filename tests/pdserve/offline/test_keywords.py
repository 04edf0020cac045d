"""The keywords of LLM: ours, vLLM's, and those that nobody knows."""

from pathlib import Path
from typing import Any

import pytest

from pdserve import LLM
from pdserve.offline.keywords import as_keywords, fill_model, read_keywords, without_effect_on_cluster
from wire.errors import ConfigError


def test_every_flag_is_a_keyword_and_vllms_are_respelled(capsys: pytest.CaptureFixture[str]) -> None:
    told = read_keywords(
        "m",
        {
            "dtype": "half", "max_model_len": 128, "kv_cache_memory": "16MiB", "gpu_memory_utilization": 0.5,
            "enable_prefix_caching": False, "swap_space": 1, "served_model_name": ["a", "b"], "quantization": None,
            "max_logprobs": -1, "default_chat_template_kwargs": {"think": True},
        },
    )  # fmt: skip

    engine, scheduler = told.engine, told.scheduler
    assert (engine.model, engine.dtype, engine.max_model_len, engine.kv_cache_memory) == ("m", "float16", 128, 2**24)
    assert (engine.gpu_memory_utilization, engine.enable_prefix_caching, engine.swap_bytes) == (0.5, False, 2**30)
    assert (engine.served_model_name, engine.quantization) == (("a", "b"), None)
    assert (scheduler.max_logprobs, scheduler.chat_settings(keyed=False).default_kwargs) == (-1, {"think": True})
    assert capsys.readouterr().err == ""


def test_those_without_effect_are_named_once_as_keywords(capsys: pytest.CaptureFixture[str]) -> None:
    read_keywords("m", {"use_v2_block_manager": True, "trust_remote_code": False, "disable_log_stats": True})
    said = capsys.readouterr().err

    assert said.startswith("without effect: use_v2_block_manager (there is one kind of KV pool)")
    assert said.count("\n") == 1
    assert "trust_remote_code" not in said, "False asks for nothing"
    assert "--" not in said


def test_every_keyword_of_vllms_own_class_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """As its LLM declares them (entrypoints/llm.py of vLLM 0.32), with its defaults, and those it once had."""
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
    told = read_keywords("m", given)

    assert told.engine.kv_cache_memory == 2**24
    assert capsys.readouterr().err.startswith("without effect: runner (")


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"gpu_memory_utilisation": 0.5}, TypeError, "did you mean gpu_memory_utilization?"),
        ({"max_length": 5}, TypeError, "LLM has no keyword 'max_length'"),
        ({"hf_overrides": {"a": 1}}, ConfigError, "hf_overrides is refused: write it into the model's config.json"),
        ({"dtype": "int3"}, ConfigError, "dtype"),
        ({"max_model_len": "long"}, ConfigError, "max_model_len"),
        ({"port": 8000}, ConfigError, "port is for servers: LLM takes none"),
        ({"tokenizer": "other"}, ConfigError, "tokenizer other is refused"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_wrong_ones_are_refused_as_keywords(keywords: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as refused:
        read_keywords("m", keywords)

    assert words in str(refused.value)
    assert "--" not in str(refused.value)


def test_a_command_to_type_keeps_its_flags() -> None:
    assert as_keywords("argument --device: --device-ids 3: make an environment by scripts/install --device cuda") == (
        "device: device_ids 3: make an environment by scripts/install --device cuda"
    )


def test_a_step_holds_the_models_length_as_everywhere(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = fill_model(read_keywords(str(model), {"max_num_batched_tokens": 64}))

    assert config.engine.max_num_batched_tokens == 512
    assert "64 is below the model's length 512" in capsys.readouterr().err


def test_a_clusters_own_flags_are_not_ours_to_set() -> None:
    assert without_effect_on_cluster({"dtype": "float32", "max_model_len": None}) == (
        "without effect on a running cluster, which has its own: dtype"
    )
    assert without_effect_on_cluster({}) is None
    with pytest.raises(TypeError, match="did you mean dtype"):
        without_effect_on_cluster({"dtyp": "float32"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cluster": "http://x", "prefill": 1}, "give either"),
        ({"api_key": "k"}, "api_key is for a cluster"),
        ({"max_in_flight": 0}, "max_in_flight is 0, must be 1 or more"),
    ],
)  # fmt: skip
def test_arguments_that_exclude_each_other_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM("m", **arguments)


def test_a_folder_that_is_no_model_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        LLM(str(tmp_path))
