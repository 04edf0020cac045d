"""Requests of each data set: random ones of the given sizes, those of files line by line."""

import json
import random
from pathlib import Path

import pytest

from pdserve.bench.load.prompt_files import FilePrompt, read_custom, read_sharegpt
from pdserve.bench.load.random_requests import RequestSizes, make_random_requests
from pdserve.bench.serve_requests import vocabulary
from wire.errors import ConfigError


def test_random_prompts_have_their_sizes_and_no_special_ids() -> None:
    requests = make_random_requests(400, RequestSizes(100, 20, ratio=0.25), random.Random(0), vocabulary=320)

    lengths = [len(request.prompt) for request in requests]
    assert (min(lengths), max(lengths)) == (75, 125)
    assert (min(request.max_tokens for request in requests), max(request.max_tokens for request in requests)) == (
        15,
        25,
    )
    assert {token for request in requests for token in request.prompt} == set(range(100, 320))


def test_a_prefix_is_shared_and_the_rest_is_not() -> None:
    requests = make_random_requests(8, RequestSizes(16, 4, prefix_len=32), random.Random(0), vocabulary=50_000)

    assert len({request.prompt[:32] for request in requests}) == 1
    assert len({request.prompt[32:] for request in requests}) == 8
    assert {len(request.prompt) for request in requests} == {48}
    assert max(int(token) for request in requests for token in request.prompt) < 40_000


def test_without_ids_prompts_are_words() -> None:
    (request,) = make_random_requests(1, RequestSizes(12, 4), random.Random(0), vocabulary=None)

    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 12


def test_a_seed_repeats_the_load() -> None:
    first, second = (make_random_requests(5, RequestSizes(9, 4), random.Random(3), vocabulary=999) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"input_len": 0, "output_len": 1}, "--random-input-len 0"),
        ({"input_len": 1, "output_len": 0}, "--random-output-len 0"),
        ({"input_len": 1, "output_len": 1, "ratio": 1.0}, "--random-range-ratio 1"),
        ({"input_len": 1, "output_len": 1, "prefix_len": -1}, "--random-prefix-len -1"),
    ],
)
def test_impossible_sizes_are_refused(shape: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RequestSizes(**shape)


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="--vocab-size 100 is too small: random prompts use token ids from 100"):
        make_random_requests(1, RequestSizes(1, 1), random.Random(0), vocabulary=100)


def test_the_vocabulary_is_that_of_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 777}')
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("[]")

    assert vocabulary(str(tmp_path)) == 777
    assert vocabulary(str(tmp_path / "odd")) == 1000
    assert vocabulary("no/such/model") == 1000


def test_lines_of_a_custom_file_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "你好", "output_tokens": 3}\n\n{"prompt": "b"}\n', encoding="utf-8")

    assert list(read_custom(path)) == [FilePrompt("你好", 3), FilePrompt("b")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: invalid JSON"),
        ("[]", 'line 2: it has no "prompt" text'),
        ('{"prompt": ""}', 'line 2: it has no "prompt" text'),
        ('{"prompt": "a", "output_tokens": 0}', 'line 2: "output_tokens" is 0'),
        ('{"prompt": "a", "output_tokens": true}', 'line 2: "output_tokens" is True'),
    ],
)
def test_a_bad_line_is_refused_by_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')

    with pytest.raises(ConfigError, match=words):
        list(read_custom(path))


def test_conversations_give_their_first_question_and_answer(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    talks = [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"value": "later"}]},
        {"conversations": [{"from": "human", "value": "alone"}]},
        {"conversations": [{"from": "human"}, {"from": "gpt", "value": "a"}]},
        {"id": 1},
        "odd",
    ]
    path.write_text(json.dumps(talks))

    assert list(read_sharegpt(path)) == [FilePrompt("q", answer="a")]


@pytest.mark.parametrize("content", ["{}", "nonsense"])
def test_a_file_without_conversations_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "share.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match=f"--dataset-path {path}"):
        list(read_sharegpt(path))


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    for read in (read_custom, read_sharegpt):
        with pytest.raises(ConfigError, match="nowhere cannot be read"):
            list(read(tmp_path / "nowhere"))
