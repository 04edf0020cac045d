"""vLLM's EngineArgs and its parser of a script's flags, over LLM's keywords."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import pdserve
from pdserve import LLM, EngineArgs, FlexibleArgumentParser, SamplingParams
from pdserve.offline.unsupported import MEMBERS, NAMES
from tests.pdserve.offline.conftest import ENGINE


def parser() -> FlexibleArgumentParser:
    """A parser like those of vLLM's examples."""
    made = FlexibleArgumentParser(prog="script")
    assert EngineArgs.add_cli_args(made) is made
    made.set_defaults(model="a/default", enforce_eager=True, runner="pooling", max_model_len=256)
    made.add_argument("--top-k", type=int)
    return made


def test_flags_of_both_become_typed_keywords() -> None:
    typed = ["--max_model_len=128", "--kv-cache-memory", "16MiB", "--no-enforce-eager", "--trust-remote-code"]
    args = vars(
        parser().parse_args([*typed, "--served-model-name", "a", "b", "--top_k", "3", "--tensor-parallel-size=1"])
    )

    assert args.pop("top_k") == 3
    given = {name: value for name, value in args.items() if value is not None}
    assert given == {
        "model": "a/default", "seed": 0, "max_model_len": 128, "kv_cache_memory": 2**24, "enforce_eager": False,
        "trust_remote_code": True, "served_model_name": ["a", "b"], "tensor_parallel_size": 1, "runner": "pooling",
    }  # fmt: skip


def test_a_file_sets_flags_and_typed_ones_override_it(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("max-model-len: 64\ndtype: float32\n")
    args = parser().parse_args(["--config", str(tmp_path / "engine.yaml"), "--max-model-len", "32"])

    assert (args.max_model_len, args.dtype) == (32, "float32")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--max-model-length", "5"], "unknown flag --max-model-length: did you mean --max-model-len?"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
        (["--port", "8000"], "unknown flag --port"),
    ],
)
def test_wrong_flags_end_a_script_with_2(typed: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(typed)

    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_keywords_object_is_a_dataclass() -> None:
    args = EngineArgs(model="m", max_model_len=128)
    args.dtype = "float32"

    assert dataclasses.asdict(args)["dtype"] == "float32"
    assert args.keywords() == {"model": "m", "max_model_len": 128, "dtype": "float32", "seed": 0}
    assert EngineArgs.from_cli_args(parser().parse_args(["--seed", "7"])).keywords()["seed"] == 7
    with pytest.raises(TypeError, match="max_model_length"):
        EngineArgs(max_model_length=5)


def _typed(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def test_an_llm_is_created_from_engine_args_in_each_way(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = [word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", _typed(value))]
    args = parser().parse_args(["--model", str(model), *typed])
    del args.top_k
    params = SamplingParams(temperature=0, max_tokens=4)

    config = {"backend": "xgrammar", "disable_any_whitespace": True}
    ways: list[Callable[[], LLM]] = [
        lambda: LLM(**vars(args)),
        lambda: LLM.from_engine_args(EngineArgs.from_cli_args(args)),
        lambda: LLM(**dataclasses.asdict(EngineArgs(str(model), **ENGINE, structured_outputs_config=config))),
    ]
    found = []
    for make in ways:
        with make() as llm:
            found.append(llm.generate("the quick brown fox", params)[0].outputs[0].token_ids)

    assert found[0] == found[1] == found[2]
    assert "structured_outputs_config (llguidance compiles the grammars" in capsys.readouterr().err


def test_missing_names_raise_with_the_reason() -> None:
    for name in NAMES:
        with pytest.raises(ImportError, match=f"^pdserve has no {name}: [a-z]"):
            getattr(pdserve, name)
    with pytest.raises(ImportError, match=r"several threads may call one LLM"):
        from pdserve import AsyncLLMEngine  # noqa: F401
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = pdserve.no_such_name


def test_no_name_listed_as_missing_exists() -> None:
    assert not {name for name in MEMBERS if name in vars(LLM)}
    assert not set(NAMES) & set(pdserve.__all__)
    for reason in (*MEMBERS.values(), *NAMES.values()):
        assert re.match(r"[A-Za-z`]", reason)


def test_a_vector_is_printed_by_its_first_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    pdserve.print_embeddings([0.5] * 20)
    pdserve.print_embeddings([1.0, 2.0], prefix="Reward")

    first, second = capsys.readouterr().out.splitlines()
    assert first == f"Embeddings: [{', '.join(['0.5'] * 16)}, ...] (size=20)"
    assert second == "Reward: [1.0, 2.0] (size=2)"
