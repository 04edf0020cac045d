"""What `pdserve bench pd` cannot measure is refused with a message, before anything starts."""

import json
from pathlib import Path

import pytest

from pdserve.bench.pd.command import chosen
from pdserve.bench.pd.options import parse
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_tokenizer
from wire.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny_tokenizer(tmp_path)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_engine_flags_go_to_every_process(model: Path) -> None:
    request = parse(["--model", str(model), "--engine", "fake", "--quick", "--no-kv-digests"])

    assert request.flags == ("--model", str(model), "--no-kv-digests", "--engine", "fake")
    assert [load.requests for load in chosen(request)] == [3, 8, 8, 8, 2]
    assert [load.name for load in chosen(parse(["--model", str(model), "--quick", "--only", "burst", "one"]))] == [
        "one at a time, 32/8", "2 streams, burst of 8 x 32",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--startup-timeout", "0"], "--startup-timeout 0: must be more than 0 s"),
        (["--port", "9000"], "--port is set by `pdserve bench pd` itself"),
        (["--vllm", "no/such"], "--vllm no/such is not executable"),
        (["--only", "nothing"], "--only nothing matches none of: one at a time"),
        ([], "the longest request has 1280 tokens, but the limit of .* is 512: try --quick"),
    ],
)
def test_mistakes_are_refused_with_a_reason(model: Path, argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        chosen(parse(["--model", str(model), *argv]))
