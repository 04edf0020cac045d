"""A command line with vLLM's flags becomes one with ours, or is refused with a message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flags.options import EngineOptions, from_namespace
from pdserve.flags.settle import notice, settle
from scheduler.config import parser
from wire.errors import ConfigError

KNOWN = frozenset(parser()._option_string_actions)


def settle_argv(*argv: str) -> tuple[str, ...]:
    return settle(argv, KNOWN).argv


def options(*argv: str) -> EngineOptions:
    return from_namespace(EngineOptions, parser().parse_args(settle_argv(*argv)))


def test_a_line_of_our_flags_is_unchanged() -> None:
    line = ("--model=m", "--served-model-name", "a", "b", "--no-kv-digests", "--kv-links", "3")

    assert settle_argv(*line) == line


def test_a_vllm_servers_command_line_starts_ours() -> None:
    made = options(
        "--model", "m", "-tp", "2", "--dtype", "half", "-q=gptq_marlin", "--swap-space", "0.5", "--max_num_seqs", "8",
        "--gpu-memory-utilization=0.8", "--trust-remote-code", "--enforce-eager", "--disable-log-requests",
        "--enable-chunked-prefill", "True", "--block-size", "32", "-pp", "1", "--log-level", "debug",
    )  # fmt: skip

    assert (made.model, made.tensor_parallel_size, made.dtype, made.quantization) == ("m", 2, "float16", "gptq")
    assert (made.swap_bytes, made.max_num_seqs, made.gpu_memory_utilization) == (2**29, 8, 0.8)
    assert (made.block_size, made.log_level, made.enforce_eager) == (32, "DEBUG", True)


def test_flags_without_effect_are_named_once_with_the_reason() -> None:
    made = settle(("--use-v2-block-manager", "--seed", "1", "--use-v2-block-manager", "--seed=2"), KNOWN)

    assert made.argv == ()
    assert notice(made.without_effect) == (
        "without effect: --use-v2-block-manager (there is one kind of KV pool); "
        "--seed (a request without a seed of its own gets a random one)"
    )


@pytest.mark.parametrize(
    ("typed", "left"),
    [
        (("--use-v2-block-manager", "folder"), ("folder",)),
        (("--seed", "7", "folder"), ("folder",)),
        (("--seed=7", "folder"), ("folder",)),
        (("--enable-chunked-prefill", "folder"), ("folder",)),
        (("--enable-chunked-prefill", "true", "folder"), ("folder",)),
        (("folder", "-O3"), ("folder",)),
        (("-O", "3", "folder"), ("folder",)),
        (("--seed", "-1", "folder"), ("folder",)),
        (("--quantization", "None", "folder"), ("folder",)),
        (("--seed", "1", "--", "--seed", "2"), ("--", "--seed", "2")),
        (("--no-async-scheduling", "folder"), ("folder",)),
        (("--no_enable_expert_parallel", "folder"), ("folder",)),
        (("--no-enforce-eager", "folder"), ("--no-enforce-eager", "folder")),
    ],
)
def test_a_dropped_flag_drops_its_own_values_and_no_other(typed: tuple[str, ...], left: tuple[str, ...]) -> None:
    assert settle_argv(*typed) == left


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("--middleware", "s"), r"^--middleware is refused: third-party code"),
        (("--tool-parser-plugin=k",), r"--tool-parser-plugin is refused: third-party code"),
        (("--kv-cache-dtype", "fp8"), r"--kv-cache-dtype fp8 is refused: KV is kept .*; accepted: auto"),
        (("-pp", "2"), r"^-pp 2 is refused: only --tensor-parallel-size splits an instance; accepted: 1"),
        (("--enable-chunked-prefill=False",), r"--enable-chunked-prefill False is refused: prompts are always"),
        (("--no-enable-chunked-prefill",), r"--no-enable-chunked-prefill is refused: prompts are always"),
        (("--no-seed",), r"^unknown flag --no-seed"),
        (("--lora-modules", "a=b", "c=d"), r"--lora-modules is refused: adapters are not supported"),
        (("--load-format", "dummy"), r"--load-format dummy is refused: .*auto, safetensors, gguf, pt"),
        (("--swap-space", "much"), r"--swap-space 'much' is not a number of GiB"),
        (("--swap-space", "nan"), r"--swap-space 'nan' is not a number of GiB"),
        (("--swap-space=-1",), r"--swap-space -1 is below 0"),
        (("--mm-processor-cache-gb", "x"), r"--mm-processor-cache-gb 'x' is not a number of GiB"),
        (("--seed",), r"--seed has no value"),
        (("--speculative_model", "d"), r"--speculative_model is refused: there is no speculative decoding"),
    ],
)
def test_unsupported_values_of_flags_are_refused_with_the_reason(typed: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settle_argv(*typed)


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("--max-modl-len", "--max-model-len"),
        ("--tensor-paralel-size=2", "--tensor-parallel-size"),
        ("--disable-log-request", "--disable-log-requests"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"^unknown flag {typed.partition('=')[0]}: did you mean {near}\\?$"):
        settle_argv(typed)


def test_a_tokenizer_is_accepted_if_it_is_the_models() -> None:
    assert settle_argv("--model", "m", "--tokenizer", "m") == ("--model", "m")
    assert settle_argv("m", "--tokenizer=m") == ("m",)
    with pytest.raises(ConfigError, match="--tokenizer other is refused"):
        settle_argv("--model", "m", "--tokenizer", "other")


_OURS: tuple[tuple[str, ...], ...] = (
    ("--max-num-seqs", "8"), ("--max-num-seqs=9",), ("--model", "m"), ("--model=a b",), ("--no-kv-digests",),
    ("--enable-prefix-caching",), ("--served-model-name", "a", "b"), ("--swap-bytes=1GiB",), ("--port", "8088"),
    ("--quantization=awq",), ("--dtype", "float32"), ("--log-level=DEBUG",), ("--kv-transport", "tcp", "shm"),
)  # fmt: skip
_THEIRS: tuple[tuple[str, ...], ...] = (
    ("--use-v2-block-manager",), ("--seed", "7"), ("--seed=-1",), ("-O3",), ("-O", "2"), ("--enable-chunked-prefill",),
    ("--enable-chunked-prefill", "True"), ("-pp=1",), ("--disable_log_requests",), ("--load-format", "auto"),
)  # fmt: skip


@given(st.lists(st.sampled_from(_OURS + _THEIRS), max_size=12))
def test_vllm_flags_in_any_position_change_none_of_ours(groups: list[tuple[str, ...]]) -> None:
    ours = [word for group in groups if group in _OURS for word in group]
    line = [word for group in groups for word in group]

    assert options(*line) == from_namespace(EngineOptions, parser().parse_args(ours))
