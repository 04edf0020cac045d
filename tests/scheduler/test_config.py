"""The scheduler's flags and environment."""

import pytest

from scheduler.config import SchedulerConfig, parse, parser
from scheduler.limits import ControlLimits
from scheduler.serving import limits_of
from wire.errors import ConfigError
from wire.types import Role


def config(*argv: str, **environ: str) -> SchedulerConfig:
    """Parse with a model given."""
    return parse(["--model", "/m", *argv], environ)


def test_defaults_are_those_of_the_guide() -> None:
    made = config()

    assert (made.engine.host, made.engine.port) == ("127.0.0.1", 9000)
    assert (made.options.startup_timeout, made.options.stall_timeout, made.options.shutdown_timeout) == (600, 10, 30)
    assert (made.options.max_queued_requests, made.options.max_queued_tokens) == (1000, 4_000_000)
    assert (made.options.retry_share, made.options.min_retries) == (0.2, 3)


def test_options_override_the_limits_of_the_control_plane() -> None:
    made = config(
        "--max-queued-requests=7", "--max-queued-tokens=8", "--retry-share=0.5", "--min-retries=9", "--path=auto",
        "--roles=auto", "--ttft-limit=2", "--orphan-limit=4", "--when-decode-is-gone=local",
    )  # fmt: skip

    assert limits_of(made.options, ControlLimits(max_tries=5), num_tenants=3) == ControlLimits(
        max_tries=5, num_tenants=3, max_queued_requests=7, max_queued_tokens=8, retry_share=0.5, min_retries=9,
        compare_paths=True, follow_load=True, ttft_limit_s=2.0, orphan_s=4.0, may_lack=frozenset({Role.DECODE}),
    )  # fmt: skip


@pytest.mark.covers("A11.14")
def test_flags_take_both_spellings_and_engine_flags_are_accepted() -> None:
    made = config(
        "--port=0", "--stall-timeout", "3", "--max-body-bytes=1MiB", "--tensor-parallel-size=2", "--dtype=auto"
    )

    assert (made.engine.port, made.options.stall_timeout, made.options.max_body_bytes) == (0, 3, 2**20)


def test_the_guides_variables_are_read_and_flags_override_them() -> None:
    variables = {"GLOBAL_RANK_TABLE_FILE_PATH": "/t.json", "NODE_PORTS": "8088,8089", "USE_OPENAI": "1"}

    assert config(**variables).options.node_ports == (8088, 8089)
    assert config("--node-ports=1,2", **variables).options.node_ports == (1, 2)
    assert config("--global-rank-table", "/other", **variables).options.global_rank_table == "/other"


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--port", "70000"], {}, "--port 70000 is not a port"),
        (["--port", "x"], {}, "--port"),
        (["--max-model-len", "1"], {}, "--max-model-len 1 is too short"),
        (["--stall-timeout", "0"], {}, r"--stall-timeout 0\.0 is out of range: more than 0"),
        (["--max-n", "-1"], {}, "--max-n -1 is out of range"),
        (["--shutdown-timeout", "-1"], {}, r"--shutdown-timeout -1\.0 is out of range: 0 or more"),
        (["--max-body-bytes", "much"], {}, "'much' is not a size"),
        (["--hf-overrides", '{"rope_theta": 1}'], {}, "is not a JSON object with matryoshka_dimensions"),
        (["--hf-overrides", '{"matryoshka_dimensions": [0]}'], {}, "must be a non-empty list of positive integers"),
        (["--hf-overrides", '{"is_matryoshka": 1}'], {}, "is_matryoshka is 1, but must be true or false"),
        (["--ttft-limit", "121"], {}, "--ttft-limit 121 is more than --first-token-timeout 120"),
        (["--ttft-limit", "nan"], {}, "--ttft-limit nan is out of range: more than 0"),
        (["--ttft-limit", "5", "--first-token-timeout", "4"], {}, "--ttft-limit 5 is more than"),
        (["--request-classes", "a:ttft=120", "b:ttft=121"], {}, "b: ttft 121 is more than --first-token-timeout 120"),
        (["--stal-timeout", "1"], {}, "did you mean --stall-timeout"),
        ([], {"NODE_PORTS": "8088;8089"}, "NODE_PORTS '8088;8089' is not a comma-separated list"),
        ([], {"NODE_PORTS": "0"}, r"NODE_PORTS has 0: a port is 1\.\.65535"),
        ([], {"USE_OPENAI": "yes"}, "USE_OPENAI='yes'"),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(argv: list[str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(*argv, **environ)


@pytest.mark.covers("B.images.7")
@pytest.mark.parametrize(
    ("value", "limit"), [("image=2", 2), ('{"image": 3, "video": 0}', 3), ("5", 5), ("image=0", 0)]
)  # fmt: skip
def test_the_limit_of_images_is_written_as_in_vllm(value: str, limit: int) -> None:
    assert config("--limit-mm-per-prompt", value).options.limit_mm_per_prompt == limit


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ConfigError, match="--model is missing"):
        parse([], {})


def test_help_describes_every_flag() -> None:
    text = parser().format_help()

    for words in ("--first-token-timeout", "NODE_PORTS", "--chat-template", "429", "--served-model-name"):
        assert words in text
