"""Errors are reported at the caller's line, and LLM leaves its user's process unchanged."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from pdserve.offline.user_errors import hide_internal_frames
from tests.cluster.conftest import fake_model  # noqa: F401 - a fixture
from wire.errors import ConfigError, InstanceLost, InternalError, InvalidRequest


def frames(error: BaseException) -> list[str]:
    """Return the names of the functions in a traceback, chained ones too; `...` separates an error from its cause."""
    shown = "".join(traceback.format_exception(error)).splitlines()
    return [line.rpartition(" in ")[2] for line in shown if line.startswith('  File "')]


def error_of(wrong: Callable[[], object]) -> BaseException:
    try:
        wrong()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: LLM("/no/such/model"), "/no/such/model"),
        (lambda: LLM("/no/such/model", dtype="float3"), "dtype"),
        (lambda: LLM(max_model_len="long"), "max_model_len"),
        (lambda: LLM(tensor_parallel=2), "did you mean tensor_parallel_size?"),
        (lambda: LLM(cluster="http://127.0.0.1:1", prefill=1), "pass either cluster or these two"),
        (lambda: LLM(cluster="127.0.0.1:9000"), "does not begin with http://"),
        (lambda: LLM(max_in_flight=0), "max_in_flight is 0"),
        (lambda: LLM(enforce_eager="maybe"), "enforce_eager is 'maybe', but must be True or False"),
        (lambda: LLM(enable_prefix_caching=1), "enable_prefix_caching is 1, but must be True or False"),
        (lambda: LLM("/no/such/model", kv_cache_memory="lots"), "kv_cache_memory: 'lots' is not a size"),
    ],
)
def test_a_wrong_argument_is_reported_at_the_callers_line(wrong: Callable[[], object], words: str) -> None:
    error = error_of(wrong)

    assert words in str(error)
    assert frames(error) == ["error_of", "<lambda>"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SamplingParams(temperature=-1),
        lambda: BeamSearchParams(beam_width=0, max_tokens=3),
        lambda: StructuredOutputsParams(),
    ],
)
def test_wrong_parameters_are_reported_at_the_callers_line(wrong: Callable[[], object]) -> None:
    assert frames(error_of(wrong)) == ["error_of", "<lambda>", "__init__"]


def test_startup_refusals_of_the_engine_name_keywords(model: Path) -> None:
    wanted = {
        "max_model_len": (10**6, "max_model_len is 1000000, but must be from 1 to the model's "),
        "quantization": ("awq", f"quantization awq, but {model} is not quantised"),
    }
    for name, (value, words) in wanted.items():
        error = error_of(lambda name=name, value=value: LLM(str(model), **{name: value}))  # type: ignore[misc]
        assert str(error).startswith(words)


def test_parameters_of_another_class_are_refused_by_their_type(local: LLM) -> None:
    error = error_of(lambda: local.beam_search("hello", SamplingParams()))  # type: ignore[arg-type]

    assert str(error) == "params holds a value of type SamplingParams, but must be BeamSearchParams"


def test_a_vector_shows_its_length(local: LLM) -> None:
    size = local.embed("hello")[0].outputs.hidden_size

    assert repr(local.embed("hello")[0].outputs) == f"EmbeddingOutput(hidden_size={size})"
    assert repr(local.encode("hello")[0].outputs) == f"PoolingOutput(data=[{size} numbers])"


def test_a_wrong_prompt_is_reported_at_the_callers_line(local: LLM) -> None:
    for wrong in (
        lambda: local.generate([[1, 2], []]),
        lambda: local.generate("hello", SamplingParams(max_tokens=2, stop_token_ids=[10**9])),
        lambda: local.chat([{"role": "nobody", "content": 3}]),
        lambda: local.embed(["x " * 5000]),
        lambda: local.generate("hello", lora_request="a"),  # type: ignore[arg-type]
        lambda: local.beam_search("hello", SamplingParams()),  # type: ignore[arg-type]
    ):
        assert frames(error_of(wrong))[2:] == []


def _raise(error: Exception) -> None:
    try:
        raise ZeroDivisionError
    except ZeroDivisionError as cause:
        raise error from cause


@pytest.mark.parametrize("error", [ConfigError("x"), InvalidRequest("x")])
def test_an_error_for_the_caller_has_no_cause(error: Exception) -> None:
    found = error_of(lambda: hide_internal_frames(_raise)(error))

    assert found is error
    assert frames(error) == ["error_of", "<lambda>"]


def test_ctrl_c_shows_the_callers_line_alone() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        hide_internal_frames(_raise)(KeyboardInterrupt())  # type: ignore[arg-type]

    assert frames(caught.value) == ["test_ctrl_c_shows_the_callers_line_alone"]


@pytest.mark.parametrize("error", [InternalError("x"), InstanceLost("x"), ValueError("of somebody else"), OSError()])
def test_any_other_error_keeps_all_of_its_frames(error: Exception) -> None:
    found = error_of(lambda: hide_internal_frames(_raise)(error))

    assert found is error
    assert frames(error)[:1] == ["_raise"]
    assert frames(error)[-1] == "_raise"


def test_variables_for_torchs_import_are_removed_again(
    fake_model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)

    with LLM(str(fake_model), engine="fake") as llm:
        assert dict(os.environ) == before
        llm.generate([[7, 8, 9]], SamplingParams(max_tokens=2))
        assert dict(os.environ) == before
